"""The model families: a folder each, named by their `model_type`.

`config.py` has the way to read a config.json of that type (`FAMILY`), and its typed configuration. `gguf.py`, if
llama.cpp has the type, has the names in its files (`ARCHITECTURES`). The module of the same name in
`forebay.models.families` describes the model of a configuration. A new family is a folder, such a module and a tiny
configuration in `tests/models/tiny.py`, which compares it with transformers. A family imports no other family: what
several share is in `parts`, here and in `forebay.models.families`; parameters of layers are in `base.mixers`.

Families called `.._assistant` draft for models of another type, and cannot be served alone. Those called `.._head` do
so as well, with layers behind the model's own. `text_encoders` has models that generate nothing, a module each.

Folders that are no families are the floors below them: `base` (fields, shapes, rotary embeddings, mixers, names of
tensors), `config` (from a config.json to a `ModelConfig`, with the encoders of pictures in `config.vision`), `parts`.
"""

from __future__ import annotations

import pkgutil
from typing import Final

_NO_FAMILIES: Final = {"base", "config", "parts", "text_encoders"}
_FOLDERS: Final = sorted(
    module.name for module in pkgutil.iter_modules(__path__) if module.ispkg and module.name not in _NO_FAMILIES
)
_ASSISTANT: Final = "_assistant"
_HEAD: Final = "_head"

ASSISTANTS: Final = tuple(name for name in _FOLDERS if name.endswith(_ASSISTANT))
HEADS: Final = tuple(name for name in _FOLDERS if name.endswith(_HEAD))
TYPES: Final = tuple(name for name in _FOLDERS if not name.endswith((_ASSISTANT, _HEAD)))
TEXT_ENCODERS: Final = tuple(
    sorted(module.name for module in pkgutil.iter_modules([f"{folder}/text_encoders" for folder in __path__]))
)

"""The model families: a folder each, named by their `model_type`.

`config.py` says how a config.json of that type is read (`FAMILY`), into which typed configuration. `gguf.py`, where
llama.cpp has the type, says what its files call things (`ARCHITECTURES`). The module of the same name in
`forebay.models.families` says what a configuration describes. A new family is a folder, such a module and a tiny
configuration in `tests/models/tiny.py`, which compares it with transformers. What several families share stands with
the first of them, and the others import it from there; what layers are built with, in `mixers.py`.

Those called `.._assistant` draft for models of another type, and cannot be served alone. Those called `.._head` do so
as well, with layers behind the model's own. The folder `vision` is no family: it has the encoders of pictures.
"""

from __future__ import annotations

import pkgutil
from typing import Final

_ENCODERS: Final = "vision"
_FOLDERS: Final = sorted(
    module.name for module in pkgutil.iter_modules(__path__) if module.ispkg and module.name != _ENCODERS
)
_ASSISTANT: Final = "_assistant"
_HEAD: Final = "_head"

ASSISTANTS: Final = tuple(name for name in _FOLDERS if name.endswith(_ASSISTANT))
HEADS: Final = tuple(name for name in _FOLDERS if name.endswith(_HEAD))
TYPES: Final = tuple(name for name in _FOLDERS if not name.endswith((_ASSISTANT, _HEAD)))

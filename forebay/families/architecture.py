"""What there is to know of a GGUF architecture to read its files as one of our model types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import StoredTensor

Tensors = dict[str, StoredTensor]

TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _as_it_is(file: GgufFile, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    return


def _as_they_are(tensors: Tensors) -> Tensors:
    return tensors


def _in_order(tensors: Tensors, extra: Mapping[str, Any]) -> Tensors:
    return tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """`interleaved_rope`: the rows of q and k are stored so that rotary pairs are neighbours, not halves.

    `keys` are metadata that it has besides those of all, with config.json's names for them, and `checked` further ones.
    `configure` looks at these and completes the configuration. `restore` undoes what the converter did to the tensors,
    which it gets by transformers' names, stacked experts one by one; `reorder`, before that, what depends on the
    configuration's `extra`.
    """

    model_type: str
    interleaved_rope: bool = False
    block_names: Mapping[str, str]
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    keys: Mapping[str, str] = field(default_factory=dict)
    checked: tuple[str, ...] = ()
    configure: Callable[[GgufFile, Mapping[str, Any], dict[str, Any]], None] = _as_it_is
    reorder: Callable[[Tensors, Mapping[str, Any]], Tensors] = _in_order
    restore: Callable[[Tensors], Tensors] = _as_they_are

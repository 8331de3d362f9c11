"""The language model inside a multimodal checkpoint: its configuration, and which tensors are its own.

Only text is served of such a model: the tensors of its other parts are left in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.base.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Nested:
    """`prefixes`: how names of the language model's tensors begin in the file, and in a checkpoint of it alone.
    `others`: how those of the other parts begin."""

    outer_type: str
    prefixes: tuple[tuple[str, str], ...]
    others: tuple[str, ...]


# By the language model's type. Published files have the first names, those saved by a bare model the others.
_NESTED: Final = {
    "gemma3_text": Nested(
        outer_type="gemma3",
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        others=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
    "qwen3_5_text": Nested(
        outer_type="qwen3_5", prefixes=(("model.language_model.", "model."),), others=("model.visual.",)
    ),
    "qwen3_5_moe_text": Nested(
        outer_type="qwen3_5_moe", prefixes=(("model.language_model.", "model."),), others=("model.visual.",)
    ),
}
_TEXT_TYPES: Final = {nested.outer_type: text for text, nested in _NESTED.items()}

# What the outer configuration says of the language model, too, where the inner one is silent.
_SHARED: Final = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config", "auto_map")


def text_config(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration; any other as it is."""
    outer = raw.get("model_type")
    if not isinstance(outer, str) or outer not in _TEXT_TYPES:
        return raw
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        raise ModelError(f"{where}: text_config is {str(inner)[:80]!r}; a {outer} model has its sizes there")
    model_type = inner.get("model_type", _TEXT_TYPES[outer])
    if model_type != _TEXT_TYPES[outer]:
        raise ModelError(f"{where}: text_config is of type {str(model_type)[:60]!r}, not {_TEXT_TYPES[outer]}")
    shared = {name: raw[name] for name in _SHARED if name in raw}
    return {**shared, **inner, "model_type": model_type}


def text_name(model_type: str, name: str) -> str:
    """A stored tensor's name in the language model alone; "" for a tensor of another part."""
    nested = _NESTED.get(model_type)
    if nested is None:
        return name
    if name.startswith(nested.others):
        return ""
    for stored, own in nested.prefixes:
        if name.startswith(stored):
            return own + name.removeprefix(stored)
    return name

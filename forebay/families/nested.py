"""The configuration of the language model inside a multimodal one: only text is served of such a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError, brief

_TEXT_TYPES: Final = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

# What the outer configuration says of the language model, too, where the inner one is silent.
_SHARED: Final = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config", "auto_map")


def text_config(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration; any other as it is."""
    outer = raw.get("model_type")
    if not isinstance(outer, str) or outer not in _TEXT_TYPES:
        return raw
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        raise ModelError(f"{where}: text_config is {brief(inner)}; a {outer} model has its sizes there")
    model_type = inner.get("model_type", _TEXT_TYPES[outer])
    if model_type != _TEXT_TYPES[outer]:
        raise ModelError(f"{where}: text_config is of type {brief(model_type)}, not {_TEXT_TYPES[outer]}")
    shared = {name: raw[name] for name in _SHARED if name in raw}
    return {**shared, **inner, "model_type": model_type}

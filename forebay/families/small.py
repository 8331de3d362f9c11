"""A small configuration of each model type, in a config.json's fields: for random models to try things with.

Widths follow from the hidden size, kinds of layers from their number; every part that a type can have is in it.
"""

from __future__ import annotations

from typing import Any, Final

from forebay.base.errors import ConfigError
from forebay.families import TYPES
from forebay.families.model_config import family
from forebay.families.shape import Shape

DEFAULT_HIDDEN_SIZE: Final = 128
DEFAULT_NUM_LAYERS: Final = 4
_MAX_POSITIONS: Final = 32_768


def small_config(model_type: str, *, hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """ConfigError for a type that there is none of, and a hidden size that does not divide into heads."""
    if model_type not in TYPES:
        raise ConfigError(f"there is no small model like {model_type!r}; there are {', '.join(TYPES)}")
    shape = Shape(hidden_size, num_layers, vocab_size)
    if hidden_size % shape.head_dim or hidden_size <= 0:
        raise ConfigError(f"a hidden size of {hidden_size} does not divide into heads of {shape.head_dim}")
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": True,
        **family(model_type).small(shape),
    }

"""A small configuration of each model type, in a config.json's fields: for random models to try things with.

Widths follow from the hidden size, kinds of layers from their number; every part that a type can have is in it.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Final

from forebay.base.errors import ConfigError
from forebay.families import TEXT_ENCODERS, TYPES
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import family
from forebay.families.config.outer import OTHER_NAMES, OUTERS
from forebay.families.small_pictures import WITH_PICTURES, picture_fields

DEFAULT_HIDDEN_SIZE: Final = 128
DEFAULT_NUM_LAYERS: Final = 4
_MAX_POSITIONS: Final = 32_768
_TEXT_POSITIONS: Final = 514  # of text encoders, of which some keep two rows of the table for padding


LIKES: Final = (*TYPES, *WITH_PICTURES, *TEXT_ENCODERS)
"""The types of which there is a small model."""


def _unknown_like(model_type: str) -> str:
    near = get_close_matches(model_type, LIKES, n=3)
    similar = f": similar are {', '.join(near)}" if near else ""
    return f"there is no small model like {model_type!r}{similar}; `forebay models make --help` lists all {len(LIKES)}"


def small_config(model_type: str, *, hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """ConfigError for a type that there is none of, and a hidden size that does not divide into heads. `vocab_size` is
    that of text."""
    if model_type not in LIKES:
        raise ConfigError(_unknown_like(model_type))
    shape = Shape(hidden_size, num_layers, vocab_size)
    if hidden_size % shape.head_dim or hidden_size <= 0:
        raise ConfigError(f"a hidden size of {hidden_size} does not divide into heads of {shape.head_dim}")
    if model_type in WITH_PICTURES:
        outer = OUTERS[model_type]
        text = _fields(outer.types.get(outer.text_type, outer.text_type), shape)
        return picture_fields(model_type, text, shape)
    return _text_encoder_fields(model_type, shape) if model_type in TEXT_ENCODERS else _fields(model_type, shape)


def _text_encoder_fields(model_type: str, shape: Shape) -> dict[str, Any]:
    published = next((name for name, ours in OTHER_NAMES.items() if ours == model_type), model_type)
    return {
        "model_type": published,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 3 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": _TEXT_POSITIONS,
        **family(model_type).small(shape),
    }


def _fields(model_type: str, shape: Shape) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 3 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": True,
        **family(model_type).small(shape),
    }

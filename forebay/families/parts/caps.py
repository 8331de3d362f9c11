"""Caps of scores and logits, and the scale of attention, as Gemma 2 has them."""

from __future__ import annotations

from forebay.families.base.fields import Fields


def pre_attention_scalar(fields: Fields) -> float:
    """Return the size whose root divides the scores. Raises ModelError for 0."""
    scalar = fields.number("query_pre_attn_scalar", default=256.0)
    if scalar == 0:
        raise fields.wrong("query_pre_attn_scalar", "above 0")
    return scalar


def cap(fields: Fields, name: str, *, default: float) -> float:
    """Return what numbers are held within, 0 for no cap, which a file says with a null. Raises ModelError for a 0 in a
    file."""
    if fields.is_null(name):
        return 0.0
    return default if fields.get(name) is None else fields.positive(name, default=default)

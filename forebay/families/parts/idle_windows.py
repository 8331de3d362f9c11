"""Windows that no text is long enough for, as some published files have them."""

from __future__ import annotations

from forebay.families.base.fields import Fields


def without_idle_window(fields: Fields) -> Fields:
    """Return the fields without a window of at least as many tokens as the model has positions."""
    window, positions = fields.get("sliding_window"), fields.get("max_position_embeddings")
    idle = type(window) is int and type(positions) is int and window >= positions > 0
    return fields.replaced(sliding_window=None) if idle else fields

"""Queries that are scaled by their position."""

from __future__ import annotations

from forebay.families.parts.query_scale import QueryScale
from forebay.layers.rotary import QueryScaleSpec


def scaled_by_position(scale: QueryScale) -> QueryScaleSpec | None:
    """Describe the scale; None if there is none."""
    return QueryScaleSpec(scale.beta, scale.length) if scale.beta else None

"""Rotary embeddings by the kind of layer, or by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.families.base.fields import MAX_NUMBER, Fields, is_number

Ropes = Mapping[str, tuple[float, dict[str, Any] | None]]
"""Base and scaling for each kind of attention."""

_THETAS: Final = "layer_rope_theta"


def rope_thetas(fields: Fields, default: Sequence[float]) -> tuple[float, ...]:
    """Read the base of each layer's rotary embedding, 0 for a layer without one; `default` if the file lists none.
    Raises ModelError for a list of another length, and for numbers that are no base."""
    given = fields.get(_THETAS)
    if given is None:
        return tuple(default)
    if not isinstance(given, list) or len(given) != len(default):
        raise fields.wrong(_THETAS, f"a list of {len(default)} numbers, one for each layer")
    if not all(is_number(value) and (value == 0 or 1 <= value <= MAX_NUMBER) for value in given):
        raise fields.wrong(_THETAS, "a list of numbers, each 0 for no rotary embedding or at least 1")
    return tuple(map(float, given))

"""Granite's windows: attention sinks in every layer, and a base of the rotary embedding for each layer, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.transformer import FULL, SLIDING, Windows
from forebay.families.parts.multipliers import GraniteConfig

WINDOWS: Final = Windows(
    size=128, layers=lambda num_layers: (layer for layer in range(num_layers) if layer % 4), required=True
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedGraniteConfig(GraniteConfig):
    """`rope_thetas`: the base of each layer's rotary embedding, 0 for a layer without one."""

    rope_thetas: tuple[float, ...]


def small_windows(shape: Shape) -> dict[str, Any]:
    """Return the windows of a small model: in three layers of four, whose others have no rotary embedding."""
    return {
        "layer_types": shape.cycle(FULL, SLIDING, SLIDING, SLIDING),
        "sliding_window": WINDOW,
        "layer_rope_theta": [10_000.0 if layer % 4 else 0 for layer in range(shape.num_layers)],
    }

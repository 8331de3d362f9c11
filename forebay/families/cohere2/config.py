from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL, SLIDING, Windows
from forebay.families.parts.parallel import HARMLESS, CohereConfig, parallel_transformer


def parse(fields: Fields) -> CohereConfig:
    """Read Command A's fields: three layers of four have a window by default."""

    def windowed(num_layers: int) -> list[int]:
        pattern = fields.size("sliding_window_pattern", default=4)
        return [i for i in range(num_layers) if (i + 1) % pattern]

    windows = Windows(layers=windowed, required=True)
    return CohereConfig(**parallel_transformer(fields, rope_theta=10_000.0, windows=windows))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a window, then one without."""
    return {
        "layer_types": shape.cycle(SLIDING, SLIDING, SLIDING, FULL),
        "sliding_window": WINDOW,
        "logit_scale": 0.25,
    }


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS | {"_sliding_window_pattern"})

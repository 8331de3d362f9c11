from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.parts import scaled_experts
from forebay.families.parts.joined_experts import NAMES
from forebay.families.parts.ropes import rope_thetas
from forebay.families.parts.scaled_windows import WINDOWS, WindowedGraniteConfig, small_windows


def parse(fields: Fields) -> WindowedGraniteConfig:
    """Read the fields of a mixture with a shared MLP, windows, and the base of each layer's rotary embedding."""
    values = scaled_experts.values(fields, windows=WINDOWS)
    return WindowedGraniteConfig(
        **values,
        shared_intermediate_size=fields.size("shared_intermediate_size", default=0),
        rope_thetas=rope_thetas(fields, [values["rope_theta"]] * values["num_layers"]),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, without a shared MLP."""
    return {**scaled_experts.small(shape), **small_windows(shape)}


FAMILY: Final = Family(parse=parse, small=small, names=NAMES)

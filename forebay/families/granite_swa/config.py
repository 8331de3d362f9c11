from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.multipliers import multipliers, small_multipliers
from forebay.families.parts.ropes import rope_thetas
from forebay.families.parts.scaled_windows import WINDOWS, WindowedGraniteConfig, small_windows

_KV_HEADS: Final = 4


def parse(fields: Fields) -> WindowedGraniteConfig:
    """Read Granite's fields, windows, and the base of each layer's rotary embedding."""
    if not fields.has("num_key_value_heads"):
        fields = fields.replaced(num_key_value_heads=_KV_HEADS)
    defaults = Defaults(kv_heads=True, rms_norm_eps=1e-5, tied=True, mlp_bias=True)
    values = transformer(fields, defaults, windows=WINDOWS)
    return WindowedGraniteConfig(
        **values,
        multipliers=multipliers(fields),
        rope_thetas=rope_thetas(fields, [values["rope_theta"]] * values["num_layers"]),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model."""
    return {**small_multipliers(shape), **small_windows(shape)}


FAMILY: Final = Family(parse=parse, small=small)

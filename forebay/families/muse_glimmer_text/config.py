from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, Windows, transformer
from forebay.families.parts.caps import cap
from forebay.families.parts.ropes import rope_thetas

_PERIOD: Final = 4  # of layers without a window and a rope, counted backward from the last


@dataclass(frozen=True, kw_only=True, slots=True)
class MuseGlimmerConfig(ModelConfig):
    """`has_rope`: whether a layer has a rotary embedding. Queries are multiplied by `query_factor`, logits by
    `logits_factor` and then held within `logits_cap`, 0 for no cap. `after_eps`: the epsilon of the norms behind
    attention and MLP."""

    has_rope: tuple[bool, ...]
    query_factor: float
    logits_factor: float
    logits_cap: float
    after_eps: float


def parse(fields: Fields) -> MuseGlimmerConfig:
    """Read Muse Glimmer's fields: each fourth layer, up to the last, has neither a window nor a rotary embedding by
    default. Of a layer's own base of the rope only whether it is 0 counts, as in transformers."""
    fields.only("hidden_activation", "silu")
    fields.only("attention_bias", False)
    windows = Windows(size=2048, layers=_windowed, required=True)
    values = transformer(fields, Defaults(head_dim=128, rms_norm_eps=1e-5), windows=windows)
    theta, windowed = values["rope_theta"], set(_windowed(values["num_layers"]))
    thetas = rope_thetas(fields, [theta if layer in windowed else 0.0 for layer in range(values["num_layers"])])
    return MuseGlimmerConfig(
        **values,
        has_rope=tuple(base > 0 for base in thetas),
        query_factor=fields.positive("qk_scale_factor", default=3.87),
        logits_factor=fields.positive("output_multiplier", default=0.19611613513818404),
        logits_cap=cap(fields, "final_logit_softcapping", default=20.0),
        after_eps=fields.number("post_norm_eps", default=1e-8),
    )


def _windowed(num_layers: int) -> list[int]:
    return [layer for layer in range(num_layers) if (num_layers - 1 - layer) % _PERIOD]


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: windows in three layers of four."""
    windowed = _windowed(shape.num_layers)
    return {
        "layer_types": [SLIDING if layer in windowed else FULL for layer in range(shape.num_layers)],
        "sliding_window": WINDOW,
    }


FAMILY: Final = Family(parse=parse, small=small, harmless=frozenset({"hidden_act"}))

"""Experts with Granite's multipliers."""

from __future__ import annotations

from typing import Any

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts
from forebay.families.config.transformer import Defaults, TransformerValues, Windows, transformer
from forebay.families.parts.multipliers import GraniteConfig, Multipliers, multipliers, small_multipliers


class MixtureValues(TransformerValues):
    """The values of a `GraniteConfig` with experts."""

    multipliers: Multipliers
    experts: Experts


def parse(fields: Fields) -> GraniteConfig:
    """Read the fields of Granite's mixtures; `intermediate_size` is one expert's."""
    return GraniteConfig(**values(fields))


def values(fields: Fields, *, windows: Windows | None = None) -> MixtureValues:
    """Return the values of a mixture, as `GraniteConfig` calls them."""
    shared = transformer(fields, Defaults(kv_heads=True), windows=windows)
    number = fields.size("num_local_experts", default=8)
    experts = Experts(
        num_experts=number,
        per_token=fields.size("num_experts_per_tok", default=2, most=number),
        intermediate_size=shared["intermediate_size"],
    )
    return {**shared, "multipliers": multipliers(fields), "experts": experts}


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": shape.hidden_size}
    return {**small_multipliers(shape), **experts}

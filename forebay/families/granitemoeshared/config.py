from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.parts import scaled_experts as granitemoe
from forebay.families.parts.joined_experts import NAMES
from forebay.families.parts.multipliers import GraniteConfig


def parse(fields: Fields) -> GraniteConfig:
    """Read the fields of a mixture, and the size of the shared MLP: no file needs to have one."""
    return replace(
        granitemoe.parse(fields), shared_intermediate_size=fields.size("shared_intermediate_size", default=0)
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, whose shared MLP is twice as wide as an expert."""
    return {**granitemoe.small(shape), "shared_intermediate_size": 2 * shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, names=NAMES)

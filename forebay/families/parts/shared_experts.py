"""Experts and an MLP of all tokens behind a gate, as Qwen 3.5 has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts
from forebay.families.config.transformer import experts
from forebay.families.parts import gated_delta as dense
from forebay.families.parts.gated_delta import Qwen35Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35MoeConfig(Qwen35Config):
    """Qwen3.5's configuration with experts, and the size of the one that every token goes to."""

    experts: Experts
    shared_intermediate_size: int


class ExpertValues(TypedDict):
    """The values of a `Qwen35MoeConfig` about experts."""

    experts: Experts
    shared_intermediate_size: int


def qwen_experts(fields: Fields, *, number: int, per_token: int) -> ExpertValues:
    """Read the fields of experts and of the shared one; the arguments are the type's defaults."""
    return {
        "experts": experts(fields, number=number, per_token=per_token, intermediate_size=512),
        "shared_intermediate_size": fields.size("shared_expert_intermediate_size", default=512),
    }


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: Qwen3.5's, and experts."""
    return {**dense.small(shape), **shape.experts(), "shared_expert_intermediate_size": shape.hidden_size}

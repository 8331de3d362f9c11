from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import Fields
from forebay.families.model_config import Experts, Family
from forebay.families.qwen3_5_text import config as dense
from forebay.families.qwen3_5_text.config import HARMLESS, NAMES, Qwen35Config, gated_transformer
from forebay.families.shape import Shape
from forebay.families.transformer import experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35MoeConfig(Qwen35Config):
    """Qwen3.5's configuration with experts, and the size of the one that every token goes to."""

    experts: Experts
    shared_intermediate_size: int


def parse(fields: Fields) -> Qwen35MoeConfig:
    """Read the fields of Qwen3.5's mixture: Qwen3.5's, with experts in every layer."""
    # Every layer has experts: there is no other feed-forward layer to have a size.
    inner = fields.size("moe_intermediate_size", default=512)
    whole = fields if fields.has("intermediate_size") else fields.replaced(intermediate_size=inner)
    return Qwen35MoeConfig(**gated_transformer(whole), **qwen_experts(fields, number=256, per_token=8))


def qwen_experts(fields: Fields, *, number: int, per_token: int) -> dict[str, Any]:
    """Read the fields of experts and of the shared one; the arguments are the type's defaults."""
    return {
        "experts": experts(fields, number=number, per_token=per_token, intermediate_size=512),
        "shared_intermediate_size": fields.size("shared_expert_intermediate_size", default=512),
    }


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: Qwen3.5's, and experts."""
    return {**dense.small(shape), **shape.experts(), "shared_expert_intermediate_size": shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)

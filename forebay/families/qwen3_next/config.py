from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.expert_layers import expert_layers
from forebay.families.parts.gated_delta import HARMLESS, NAMES, gated_transformer
from forebay.families.parts.shared_experts import Qwen35MoeConfig, qwen_experts, small


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Qwen3.5's configuration with experts in some layers."""

    expert_layers: tuple[int, ...]
    norm_topk_prob: bool


def parse(fields: Fields) -> Qwen3NextConfig:
    """Read Qwen3-Next's fields: Qwen3.5's, with 512 experts by default."""
    return Qwen3NextConfig(
        **gated_transformer(fields),
        **qwen_experts(fields, number=512, per_token=10),
        expert_layers=expert_layers(fields),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
    )


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)

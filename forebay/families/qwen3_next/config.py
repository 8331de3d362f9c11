from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.fields import Fields
from forebay.families.model_config import Family
from forebay.families.qwen3_5_moe_text.config import Qwen35MoeConfig, qwen_experts, small
from forebay.families.qwen3_5_text.config import HARMLESS, NAMES, gated_transformer
from forebay.families.qwen3_moe.config import expert_layers


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

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.parts.gated_delta import HARMLESS, NAMES, gated_transformer
from forebay.families.parts.shared_experts import Qwen35MoeConfig, qwen_experts, small


def parse(fields: Fields) -> Qwen35MoeConfig:
    """Read the fields of Qwen3.5's mixture: Qwen3.5's, with experts in every layer."""
    # Every layer has experts: there is no other feed-forward layer to have a size.
    inner = fields.size("moe_intermediate_size", default=512)
    whole = fields if fields.has("intermediate_size") else fields.replaced(intermediate_size=inner)
    return Qwen35MoeConfig(**gated_transformer(whole), **qwen_experts(fields, number=256, per_token=8))


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)

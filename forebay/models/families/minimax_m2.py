from __future__ import annotations

from dataclasses import replace

from forebay.families.minimax_m2.config import MiniMaxM2Config
from forebay.families.parts.wide_experts import EXPERT_PARTS
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import MoeSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, rope_spec, router_spec
from forebay.ops import Scoring


def block(config: MiniMaxM2Config, layer: int) -> BlockSpec:
    """Describe a layer: attention that rotates part of each head, and experts chosen by corrected sigmoids."""
    attention = attention_spec(config, layer, qk_norm=QkNorm.FULL)
    attention = replace(attention, rope=replace(rope_spec(config), dim=config.rotary_dim))
    return block_spec(config, layer, attention, _experts(config, layer))


def _experts(config: MiniMaxM2Config, layer: int) -> MoeSpec:
    name, experts = f"{layer_name(layer)}.block_sparse_moe", config.experts
    correction = f"{name}.e_score_correction_bias"
    router = router_spec(config, experts, f"{name}.gate", Scoring.SIGMOID, normalize=True, correction=correction)
    return MoeSpec(name=name, router=router, intermediate_size=experts.intermediate_size, names=EXPERT_PARTS)

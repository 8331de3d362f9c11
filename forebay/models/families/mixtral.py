from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.wide_experts import EXPERT_PARTS, MixtralConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, softmax_experts


def block(config: MixtralConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention, and experts whose weights sum to 1."""
    name = f"{layer_name(layer)}.block_sparse_moe"
    experts = softmax_experts(config, config.experts, name, router="gate", normalize=True)
    return block_spec(config, layer, attention_spec(config, layer), replace(experts, names=EXPERT_PARTS))

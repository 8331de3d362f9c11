from __future__ import annotations

from dataclasses import replace

from forebay.families.qwen2_moe.config import Qwen2MoeConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec
from forebay.models.families.parts.shared_experts import qwen_experts


def block(config: Qwen2MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen2's, with experts instead of an MLP if it has them."""
    attention = replace(attention_spec(config, layer), qkv_bias=config.qkv_bias)
    return block_spec(config, layer, attention, _mlp(config, layer))


def _mlp(config: Qwen2MoeConfig, layer: int) -> PartSpec:
    if layer not in config.expert_layers:
        return mlp_spec(config, layer)
    shared_size, normalize = config.shared_intermediate_size, config.norm_topk_prob
    return qwen_experts(config, layer, config.experts, shared_size=shared_size, normalize=normalize)

from __future__ import annotations

from forebay.families.parts.expert_layers import Qwen3MoeConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec, PartSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, mlp_spec, softmax_experts


def block(config: Qwen3MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3's, with experts instead of an MLP if it has them."""
    return block_spec(config, layer, attention_spec(config, layer, qk_norm=QkNorm.HEAD), _mlp(config, layer))


def _mlp(config: Qwen3MoeConfig, layer: int) -> PartSpec:
    if layer not in config.expert_layers:
        return mlp_spec(config, layer)
    name = f"{layer_name(layer)}.mlp"
    return softmax_experts(config, config.experts, name, router="gate", normalize=config.norm_topk_prob)

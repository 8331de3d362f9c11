from __future__ import annotations

from forebay.families.olmoe.config import OlmoeConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, softmax_experts


def block(config: OlmoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention whose queries and keys are normed over all heads at once, and experts."""
    name, normalize = f"{layer_name(layer)}.mlp", config.norm_topk_prob
    experts = softmax_experts(config, config.experts, name, router="gate", normalize=normalize)
    return block_spec(config, layer, attention_spec(config, layer, qk_norm=QkNorm.FULL), experts)

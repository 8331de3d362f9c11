from __future__ import annotations

from forebay.families.parts.experts import GroupedConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec
from forebay.models.families.parts.latent import feed_forward


def block(config: GroupedConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3's attention, and an MLP or experts."""
    attention = attention_spec(config, layer, qk_norm=QkNorm.HEAD)
    return block_spec(config, layer, attention, feed_forward(config, layer))

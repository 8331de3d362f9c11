from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.experts import GroupedConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec
from forebay.models.families.parts.latent import feed_forward


def block(config: GroupedConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention, whose output has no bias, and experts."""
    attention = replace(attention_spec(config, layer), o_bias=False)
    return block_spec(config, layer, attention, feed_forward(config, layer))

from __future__ import annotations

from dataclasses import replace

from forebay.families.seed_oss.config import SeedOssConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: SeedOssConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with a bias of attention's output only if the configuration has it."""
    attention = replace(attention_spec(config, layer), o_bias=config.attention_out_bias)
    return block_spec(config, layer, attention, mlp_spec(config, layer))

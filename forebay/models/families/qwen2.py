from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with a bias of queries, keys and values."""
    attention = replace(attention_spec(config, layer), qkv_bias=True)
    return block_spec(config, layer, attention, mlp_spec(config, layer))

from __future__ import annotations

from dataclasses import replace

from forebay.families.ministral3.config import Ministral3Config
from forebay.layers.build import BlockSpec
from forebay.layers.rotary import QueryScaleSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: Ministral3Config, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with queries that are scaled by their position."""
    scale = QueryScaleSpec(config.query_beta, config.query_length) if config.query_beta else None
    attention = replace(attention_spec(config, layer), query_scale=scale)
    return block_spec(config, layer, attention, mlp_spec(config, layer))

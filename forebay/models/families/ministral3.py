from __future__ import annotations

from dataclasses import replace

from forebay.families.ministral3.config import Ministral3Config
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec
from forebay.models.families.parts.query_scale import scaled_by_position


def block(config: Ministral3Config, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with queries that are scaled by their position."""
    attention = replace(attention_spec(config, layer), query_scale=scaled_by_position(config.query_scale))
    return block_spec(config, layer, attention, mlp_spec(config, layer))

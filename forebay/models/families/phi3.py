from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.partial_rotary import PartialRotaryConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import block_spec
from forebay.models.families.parts.partial_rotary import joined_mlp, partly_rotated


def block(config: PartialRotaryConfig, layer: int) -> BlockSpec:
    """Describe a layer whose checkpoint has one matrix for queries, keys and values, and one for gate and up."""
    attention = replace(partly_rotated(config, layer), qkv_name="qkv_proj")
    return block_spec(config, layer, attention, joined_mlp(config, layer))

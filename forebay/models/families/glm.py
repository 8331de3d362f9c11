from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.partial_rotary import PartialRotaryConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import block_spec
from forebay.models.families.parts.partial_rotary import joined_mlp, partly_rotated


def block(config: PartialRotaryConfig, layer: int) -> BlockSpec:
    """Describe a layer with a norm before each part, and neighbours as rotary pairs."""
    attention = replace(partly_rotated(config, layer), o_bias=False, interleaved=True)
    return block_spec(config, layer, attention, joined_mlp(config, layer))

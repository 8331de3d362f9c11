from __future__ import annotations

from dataclasses import replace

from forebay.families.glm4.config import PartialRotaryConfig
from forebay.families.glm4.model import joined_mlp, partly_rotated
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, pre_norm


def describe(config: PartialRotaryConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: PartialRotaryConfig, layer: int) -> BlockSpec:
    attention = replace(partly_rotated(config, layer), qkv_name="qkv_proj")
    return pre_norm(config, layer, attention, joined_mlp(config, layer))

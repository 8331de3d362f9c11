from __future__ import annotations

from dataclasses import replace

from forebay.families.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, pre_norm


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    attention = replace(attention_spec(config, layer), interleaved=True)
    return pre_norm(config, layer, attention, mlp_spec(config, layer))

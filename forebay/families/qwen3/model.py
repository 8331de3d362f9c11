from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, pre_norm


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    return pre_norm(config, layer, attention_spec(config, layer, qk_norm=QkNorm.HEAD), mlp_spec(config, layer))

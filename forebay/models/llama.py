"""Llama, and what follows it: Llama 2 and 3, SmolLM 1 and 2, and many more."""

from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, norm_param


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    bias = config.attention_bias
    return PreNormSpec(
        mixer=attention_spec(config, layer, qkv_bias=bias, o_bias=bias),
        mlp=mlp_spec(config, layer, bias=config.mlp_bias),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "post_attention_layernorm"),
        norm_eps=config.rms_norm_eps,
    )

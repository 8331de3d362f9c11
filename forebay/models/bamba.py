"""Bamba: Mamba-2 mixers, with an attention layer here and there that rotates half of each head; an MLP after each."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.mamba2.config import Mamba2Config
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.params import vector
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, norm_param, rope_spec
from forebay.models.mamba_mixers import mamba2_spec


def describe(config: Mamba2Config) -> DecoderSpec:
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        norm=vector("model.final_layernorm.weight", config.hidden_size),
    )


def _block(config: Mamba2Config, layer: int) -> BlockSpec:
    return PreNormSpec(
        mixer=_mixer(config, layer),
        mlp=MlpSpec(
            name=f"{layer_name(layer)}.feed_forward",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            bias=config.mlp_bias,
        ),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "pre_ff_layernorm"),
        norm_eps=config.rms_norm_eps,
    )


def _mixer(config: Mamba2Config, layer: int) -> PartSpec:
    if config.layer_types[layer] == "linear_attention":
        return mamba2_spec(config, f"{layer_name(layer)}.mamba")
    bias = config.attention_bias
    attention = attention_spec(config, layer, qkv_bias=bias, o_bias=bias)
    return replace(attention, rope=replace(rope_spec(config), dim=config.head_dim // 2))

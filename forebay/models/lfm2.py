"""LFM 2: gated short convolutions, with an attention layer among every few of them."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.lfm2.config import CONV, Lfm2Config
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.params import vector
from forebay.layers.short_conv import ShortConvSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, norm_param

GATE_UP_DOWN = ("w1", "w3", "w2")


def describe(config: Lfm2Config) -> DecoderSpec:
    return lfm_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def lfm_decoder(config: Lfm2Config, blocks: list[BlockSpec]) -> DecoderSpec:
    return replace(decoder_spec(config, blocks), norm=vector("model.embedding_norm.weight", config.hidden_size))


def _block(config: Lfm2Config, layer: int) -> BlockSpec:
    return lfm2_block(config, layer, dense_mlp(config, layer))


def lfm2_block(config: Lfm2Config, layer: int, mlp: PartSpec) -> BlockSpec:
    return PreNormSpec(
        mixer=_mixer(config, layer),
        mlp=mlp,
        mixer_norm=norm_param(config, layer, "operator_norm"),
        mlp_norm=norm_param(config, layer, "ffn_norm"),
        norm_eps=config.rms_norm_eps,
    )


def _mixer(config: Lfm2Config, layer: int) -> PartSpec:
    if config.layer_types[layer] == CONV:
        return conv_spec(config, layer)
    attention = attention_spec(config, layer, qk_norm=QkNorm.HEAD)
    return replace(attention, output_name="out_proj", norm_name="layernorm")


def conv_spec(config: Lfm2Config, layer: int) -> ShortConvSpec:
    return ShortConvSpec(
        name=f"{layer_name(layer)}.conv",
        hidden_size=config.hidden_size,
        width=config.conv_width,
        bias=config.conv_bias,
    )


def dense_mlp(config: Lfm2Config, layer: int) -> MlpSpec:
    return MlpSpec(
        name=f"{layer_name(layer)}.feed_forward",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        names=GATE_UP_DOWN,
    )

"""LFM 3: short convolutions, attention over everything and over a window, norms before and after both halves."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.lfm2.config import CONV
from forebay.families.lfm3.config import Lfm3Config
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import PreNormSpec, SandwichSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import DecoderSpec, attention_spec, norm_param
from forebay.models.lfm2 import conv_spec, dense_mlp, lfm_decoder


def describe(config: Lfm3Config) -> DecoderSpec:
    return lfm_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: Lfm3Config, layer: int) -> BlockSpec:
    mixer, mlp = _mixer(config, layer), dense_mlp(config, layer)
    mixer_norm, mlp_norm = (norm_param(config, layer, name) for name in ("operator_norm", "ffn_norm"))
    if not config.use_sandwich_norm:
        return PreNormSpec(mixer=mixer, mlp=mlp, mixer_norm=mixer_norm, mlp_norm=mlp_norm, norm_eps=config.rms_norm_eps)
    return SandwichSpec(
        mixer=mixer,
        mlp=mlp,
        mixer_norms=(mixer_norm, norm_param(config, layer, "post_operator_norm")),
        mlp_norms=(mlp_norm, norm_param(config, layer, "post_ffn_norm")),
        norm_eps=config.rms_norm_eps,
    )


def _mixer(config: Lfm3Config, layer: int) -> PartSpec:
    kind = config.layer_types[layer]
    if kind == CONV:
        return conv_spec(config, layer)
    bias = config.attention_bias
    return replace(
        attention_spec(config, layer, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.HEAD),
        rope=RopeSpec(config.head_dim, *config.ropes[kind]),
        head_gate=config.use_attention_gate,
    )

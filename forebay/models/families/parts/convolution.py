"""Layers of short convolutions and attention."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.convolution import CONV, Lfm2Config
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.short_conv import ShortConvSpec
from forebay.models.decoder import DecoderOptions, attention_spec, block_spec, layer_name, mlp_spec

GATE_UP_DOWN = ("w1", "w3", "w2")
DECODER: DecoderOptions = {"norm": "model.embedding_norm"}
NORMS = ("operator_norm", "ffn_norm")


def lfm2_block(config: Lfm2Config, layer: int, mlp: PartSpec) -> BlockSpec:
    """Describe a layer around `mlp`, with LFM2's names of the norms."""
    return block_spec(config, layer, _mixer(config, layer), mlp, before=NORMS)


def _mixer(config: Lfm2Config, layer: int) -> PartSpec:
    if config.layer_types[layer] == CONV:
        return conv_spec(config, layer)
    attention = attention_spec(config, layer, qk_norm=QkNorm.HEAD)
    return replace(attention, output_name="out_proj", norm_names=("q_layernorm", "k_layernorm"))


def conv_spec(config: Lfm2Config, layer: int) -> ShortConvSpec:
    """Describe the short convolution of a layer."""
    return ShortConvSpec(
        name=f"{layer_name(layer)}.conv",
        hidden_size=config.hidden_size,
        width=config.conv_width,
        bias=config.conv_bias,
    )


def dense_mlp(config: Lfm2Config, layer: int) -> MlpSpec:
    """Describe a layer's MLP, with LFM2's names of its matrices."""
    return replace(mlp_spec(config, layer, name="feed_forward"), names=GATE_UP_DOWN)

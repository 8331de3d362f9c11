"""Mamba-2: nothing but mixers."""

from __future__ import annotations

from forebay.families.mamba2.config import Mamba2Config
from forebay.layers.blocks import SingleSpec
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec
from forebay.models.mamba_mixers import backbone_decoder, backbone_layer, backbone_norm, mamba2_spec


def describe(config: Mamba2Config) -> DecoderSpec:
    return backbone_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: Mamba2Config, layer: int) -> BlockSpec:
    return SingleSpec(
        mixer=mamba2_spec(config, f"{backbone_layer(layer)}.mixer"),
        norm=backbone_norm(config, layer),
        norm_eps=config.rms_norm_eps,
    )

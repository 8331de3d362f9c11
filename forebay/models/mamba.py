"""Mamba: nothing but mixers, the first kind."""

from __future__ import annotations

from forebay.families.mamba.config import MambaConfig
from forebay.layers.blocks import SingleSpec
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec
from forebay.models.mamba_mixers import backbone_decoder, backbone_layer, backbone_norm, mamba1_spec


def describe(config: MambaConfig) -> DecoderSpec:
    return backbone_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: MambaConfig, layer: int) -> BlockSpec:
    return SingleSpec(
        mixer=mamba1_spec(config, f"{backbone_layer(layer)}.mixer"),
        norm=backbone_norm(config, layer),
        norm_eps=config.rms_norm_eps,
    )

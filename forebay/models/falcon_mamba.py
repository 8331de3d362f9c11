"""Falcon Mamba: Mamba with an RMS norm, without weights, of each of the step widths, b and c."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.falcon_mamba.config import FalconMambaConfig
from forebay.layers.blocks import SingleSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mamba1 import ScanNorm
from forebay.models.decoder import DecoderSpec
from forebay.models.mamba_mixers import backbone_decoder, backbone_layer, backbone_norm, mamba1_spec


def describe(config: FalconMambaConfig) -> DecoderSpec:
    return backbone_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: FalconMambaConfig, layer: int) -> BlockSpec:
    mixer = mamba1_spec(config, f"{backbone_layer(layer)}.mixer")
    return SingleSpec(
        mixer=replace(mixer, norm=ScanNorm.PLAIN, norm_eps=config.mixer_rms_eps),
        norm=backbone_norm(config, layer),
        norm_eps=config.rms_norm_eps,
    )

from __future__ import annotations

from dataclasses import replace

from forebay.families.falcon_mamba.config import FalconMambaConfig
from forebay.families.mamba.model import backbone_decoder, mamba1_spec, mixer_name
from forebay.layers.mamba1 import Mamba1Spec, ScanNorm
from forebay.models.decoder import DecoderSpec


def describe(config: FalconMambaConfig) -> DecoderSpec:
    return backbone_decoder(config, [_mixer(config, layer) for layer in range(config.num_layers)])


def _mixer(config: FalconMambaConfig, layer: int) -> Mamba1Spec:
    mixer = mamba1_spec(config, mixer_name(layer))
    return replace(mixer, norm=ScanNorm.PLAIN, norm_eps=config.mixer_rms_eps)

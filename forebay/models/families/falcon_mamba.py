from __future__ import annotations

from dataclasses import replace

from forebay.families.falcon_mamba.config import FalconMambaConfig
from forebay.layers.build import BlockSpec
from forebay.layers.mamba1 import ScanNorm
from forebay.models.families.parts.mamba import DECODER as BACKBONE
from forebay.models.families.parts.mamba import backbone_block, mamba1_spec, mixer_name

DECODER = BACKBONE


def block(config: FalconMambaConfig, layer: int) -> BlockSpec:
    """Describe a layer: Mamba's, with dt, b and c normed without weights."""
    mixer = mamba1_spec(config, mixer_name(layer))
    return backbone_block(config, layer, replace(mixer, norm=ScanNorm.PLAIN, norm_eps=config.mixer_rms_eps))

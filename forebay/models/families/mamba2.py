from __future__ import annotations

from forebay.families.parts.mamba2 import Mamba2Config
from forebay.layers.build import BlockSpec
from forebay.models.families.parts.mamba import DECODER as BACKBONE
from forebay.models.families.parts.mamba import backbone_block, mixer_name
from forebay.models.families.parts.mamba2 import mamba2_spec

DECODER = BACKBONE


def block(config: Mamba2Config, layer: int) -> BlockSpec:
    """Describe a layer: a norm and a Mamba-2 mixer."""
    return backbone_block(config, layer, mamba2_spec(config, mixer_name(layer)))

from __future__ import annotations

from forebay.families.parts.mamba import MambaConfig
from forebay.layers.build import BlockSpec
from forebay.models.families.parts.mamba import DECODER, backbone_block, mamba1_spec, mixer_name

__all__ = ["DECODER", "block"]


def block(config: MambaConfig, layer: int) -> BlockSpec:
    """Describe a layer: a norm and a Mamba mixer."""
    return backbone_block(config, layer, mamba1_spec(config, mixer_name(layer)))

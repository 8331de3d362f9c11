from __future__ import annotations

from forebay.families.parts.convolution import Lfm2Config
from forebay.layers.build import BlockSpec
from forebay.models.families.parts.convolution import DECODER, dense_mlp, lfm2_block

__all__ = ["DECODER", "block"]


def block(config: Lfm2Config, layer: int) -> BlockSpec:
    """Describe a layer: a short convolution or attention, and an MLP."""
    return lfm2_block(config, layer, dense_mlp(config, layer))

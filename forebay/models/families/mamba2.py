from __future__ import annotations

from forebay.families.mamba2.config import Mamba2Config
from forebay.layers.build import BlockSpec
from forebay.layers.mamba2 import GatedNormSpec, Mamba2Spec
from forebay.models.families.mamba import BACKBONE, backbone_block, mixer_name

DECODER = BACKBONE


def block(config: Mamba2Config, layer: int) -> BlockSpec:
    """Describe a layer: a norm and a Mamba-2 mixer."""
    return backbone_block(config, layer, mamba2_spec(config, mixer_name(layer)))


def mamba2_spec(config: Mamba2Config, name: str) -> Mamba2Spec:
    """With a gated norm behind the scan; `name` is the checkpoint's prefix."""
    norm = GatedNormSpec(eps=config.rms_norm_eps)
    return Mamba2Spec(name=name, hidden_size=config.hidden_size, mixer=config.mixer, norm=norm)

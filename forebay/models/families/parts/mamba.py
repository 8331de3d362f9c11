"""Mamba mixers, and blocks of a mixer alone."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.mamba import MambaConfig
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mamba1 import Mamba1Spec
from forebay.layers.params import vector
from forebay.models.decoder import DecoderOptions

DECODER: DecoderOptions = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f"}
"""As Mamba's own checkpoints have it, and those of families that came from it."""


def backbone_block(config: ModelConfig, layer: int, mixer: PartSpec) -> BlockSpec:
    """Describe a block of a mixer alone."""
    norm = vector(f"backbone.layers.{layer}.norm.weight", config.hidden_size)
    return ResidualSpec(sublayers=(SublayerSpec(part=mixer, before=norm),), norm_eps=config.rms_norm_eps)


def mixer_name(layer: int) -> str:
    """Return the checkpoint's prefix of a layer's mixer."""
    return f"backbone.layers.{layer}.mixer"


def mamba1_spec(config: MambaConfig, name: str) -> Mamba1Spec:
    """Without norms within the mixer; `name` is the checkpoint's prefix."""
    return Mamba1Spec(name=name, hidden_size=config.hidden_size, mixer=config.mixer)

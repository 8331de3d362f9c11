from __future__ import annotations

from collections.abc import Sequence

from forebay.families.mamba.config import MambaConfig
from forebay.families.model_config import ModelConfig
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mamba1 import Mamba1Spec
from forebay.layers.params import vector
from forebay.models.decoder import DecoderSpec, decoder_spec


def describe(config: MambaConfig) -> DecoderSpec:
    mixers = [mamba1_spec(config, mixer_name(layer)) for layer in range(config.num_layers)]
    return backbone_decoder(config, mixers)


def backbone_decoder(config: ModelConfig, mixers: Sequence[PartSpec]) -> DecoderSpec:
    """One in each layer, under the names that Mamba's own checkpoints have, and those of families that came from it."""
    blocks = [_block(config, layer, mixer) for layer, mixer in enumerate(mixers)]
    return decoder_spec(config, blocks, embedding="backbone.embeddings", norm="backbone.norm_f")


def _block(config: ModelConfig, layer: int, mixer: PartSpec) -> BlockSpec:
    norm = vector(f"backbone.layers.{layer}.norm.weight", config.hidden_size)
    return ResidualSpec(sublayers=(SublayerSpec(part=mixer, before=norm),), norm_eps=config.rms_norm_eps)


def mixer_name(layer: int) -> str:
    return f"backbone.layers.{layer}.mixer"


def mamba1_spec(config: MambaConfig, name: str) -> Mamba1Spec:
    """Without norms within the mixer; `name` is the checkpoint's prefix."""
    return Mamba1Spec(name=name, hidden_size=config.hidden_size, mixer=config.mixer)

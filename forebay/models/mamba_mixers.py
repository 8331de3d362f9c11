"""The Mamba mixers of all families, from their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.families.mamba.config import MambaConfig
from forebay.families.mamba2.config import Mamba2Config
from forebay.families.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.layers.mamba1 import Mamba1Spec
from forebay.layers.mamba2 import GatedNorm, Mamba2Spec
from forebay.layers.params import TensorParam, vector
from forebay.models.decoder import DecoderSpec, decoder_spec


def backbone_decoder(config: ModelConfig, blocks: Sequence[BlockSpec]) -> DecoderSpec:
    """Under the names that Mamba's own checkpoints have, and those of families that came from it."""
    spec = decoder_spec(config, blocks)
    return replace(
        spec,
        embedding=replace(spec.embedding, names=("backbone.embeddings.weight",)),
        norm=vector("backbone.norm_f.weight", config.hidden_size),
    )


def backbone_layer(layer: int) -> str:
    return f"backbone.layers.{layer}"


def backbone_norm(config: ModelConfig, layer: int) -> TensorParam:
    return vector(f"{backbone_layer(layer)}.norm.weight", config.hidden_size)


def mamba2_spec(config: Mamba2Config, name: str) -> Mamba2Spec:
    """With a gated norm behind the scan; `name` is the checkpoint's prefix."""
    mixer = config.mixer
    return Mamba2Spec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        num_groups=mixer.num_groups,
        state_size=mixer.state_size,
        width=mixer.width,
        norm=GatedNorm(eps=config.rms_norm_eps),
        in_bias=mixer.bias,
        conv_bias=mixer.conv_bias,
        out_bias=mixer.bias,
        dt_limit=mixer.dt_limit,
    )


def mamba1_spec(config: MambaConfig, name: str) -> Mamba1Spec:
    """Without norms within the mixer."""
    mixer = config.mixer
    return Mamba1Spec(
        name=name,
        hidden_size=config.hidden_size,
        intermediate_size=mixer.intermediate_size,
        state_size=mixer.state_size,
        rank=mixer.dt_rank,
        width=mixer.width,
        bias=mixer.bias,
        conv_bias=mixer.conv_bias,
    )

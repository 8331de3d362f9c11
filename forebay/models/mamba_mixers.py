"""The Mamba mixers of all families, from their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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


def mamba2_spec(config: ModelConfig, name: str) -> Mamba2Spec:
    """With a gated norm behind the scan; `name` is the checkpoint's prefix."""
    extra = config.extra
    return Mamba2Spec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=extra["mamba_n_heads"],
        head_dim=extra["mamba_d_head"],
        num_groups=extra["mamba_n_groups"],
        state_size=extra["mamba_d_state"],
        width=extra["mamba_d_conv"],
        norm=GatedNorm(eps=config.rms_norm_eps),
        in_bias=extra["mamba_proj_bias"],
        conv_bias=extra["mamba_conv_bias"],
        out_bias=extra["mamba_proj_bias"],
        dt_limit=extra["time_step_limit"],
    )


def mamba1_spec(config: ModelConfig, name: str) -> Mamba1Spec:
    """Without norms within the mixer."""
    extra = config.extra
    return Mamba1Spec(
        name=name,
        hidden_size=config.hidden_size,
        intermediate_size=extra["mamba_intermediate_size"],
        state_size=extra["mamba_d_state"],
        rank=extra["mamba_dt_rank"],
        width=extra["mamba_d_conv"],
        bias=extra["mamba_proj_bias"],
        conv_bias=extra["mamba_conv_bias"],
    )

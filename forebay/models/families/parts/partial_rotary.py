"""Attention with partial rotary embeddings, and an MLP whose inputs are joined."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.partial_rotary import PartialRotaryConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.mlp import MlpSpec
from forebay.models.decoder import attention_spec, mlp_spec, rope_spec


def partly_rotated(config: PartialRotaryConfig, layer: int) -> AttentionSpec:
    """Describe attention that rotates the first `rotary_dim` dimensions of each head."""
    return replace(attention_spec(config, layer), rope=replace(rope_spec(config), dim=config.rotary_dim))


def joined_mlp(config: PartialRotaryConfig, layer: int) -> MlpSpec:
    """Describe an MLP whose gate and up are one matrix of the checkpoint."""
    return replace(mlp_spec(config, layer), names=("gate_up_proj", "down_proj"))

"""Layers with Gemma's four norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import Activation
from forebay.models.decoder import DecoderSpec, block_spec, decoder_spec, mlp_spec

NORM_OFFSET = 1.0  # norm weights are stored as differences from it


def with_blocks(config: ModelConfig, blocks: Sequence[BlockSpec]) -> DecoderSpec:
    """Describe a model with norms that have an offset, and embeddings scaled by the root of the hidden size."""
    spec = decoder_spec(config, blocks, norm_offset=NORM_OFFSET)
    return replace(spec, embedding_scale=float(config.hidden_size) ** 0.5)


def block(config: ModelConfig, layer: int, attention: AttentionSpec) -> BlockSpec:
    """Describe a layer with norms before and behind attention and a GELU MLP."""
    return block_spec(
        config,
        layer,
        attention,
        replace(mlp_spec(config, layer), activation=Activation.GELU_TANH),
        before=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
        norm_offset=NORM_OFFSET,
    )

"""Blocks with multipliers, and experts beside a shared MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.multipliers import GraniteConfig, Multipliers
from forebay.layers.attention import AttentionSpec
from forebay.layers.blocks import ResidualSpec
from forebay.layers.build import PartSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import (
    DecoderSpec,
    attention_spec,
    block_spec,
    decoder_spec,
    layer_name,
    mlp_spec,
    softmax_experts,
)


def describe(config: GraniteConfig) -> DecoderSpec:
    """Describe the whole model: Llama with an MLP or with experts, and scaled."""
    multipliers = config.multipliers
    return scaled(config, multipliers, lambda layer: block(config, layer, scaled_attention(config, multipliers, layer)))


def scaled(config: ModelConfig, multipliers: Multipliers, block: Callable[[int], ResidualSpec]) -> DecoderSpec:
    """Describe a model of such blocks, of which each adds what `residual` says, with scaled embeddings and logits."""
    blocks = [replace(block(layer), multiplier=multipliers.residual) for layer in range(config.num_layers)]
    return replace(
        decoder_spec(config, blocks),
        embedding_scale=multipliers.embedding,
        logits_scale=1 / multipliers.logits,
    )


def scaled_attention(config: ModelConfig, multipliers: Multipliers, layer: int, *, rope: bool = True) -> AttentionSpec:
    """Describe attention with Granite's constant before the softmax, instead of one by the size of heads."""
    return replace(attention_spec(config, layer, rope=rope), scale=multipliers.attention)


def experts_and_shared(config: ModelConfig, layer: int, *, shared_size: int) -> PartSpec:
    """Describe experts, an MLP that all tokens share, or both; `shared_size` is that MLP's, 0 for none."""
    shared = MlpSpec(
        name=f"{layer_name(layer)}.shared_mlp",
        hidden_size=config.hidden_size,
        intermediate_size=shared_size,
        names=("input_linear", "output_linear"),
    )
    if config.experts is None:
        return shared
    name = f"{layer_name(layer)}.block_sparse_moe"
    routed = softmax_experts(config, config.experts, name, router="router", normalize=True)
    return SumSpec(first=routed, second=shared) if shared_size else routed


def block(config: GraniteConfig, layer: int, attention: AttentionSpec) -> ResidualSpec:
    """Describe a layer with an MLP, or with experts and, if the configuration has one, a shared MLP."""
    if config.experts is None:
        return block_spec(config, layer, attention, mlp_spec(config, layer))
    feed_forward = experts_and_shared(config, layer, shared_size=config.shared_intermediate_size)
    return block_spec(config, layer, attention, feed_forward)

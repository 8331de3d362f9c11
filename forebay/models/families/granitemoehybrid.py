from __future__ import annotations

from dataclasses import replace

from forebay.families.granitemoehybrid.config import GraniteMoeHybridConfig
from forebay.families.transformer import LINEAR
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, attention_spec, block_spec, decoder_spec, layer_name, softmax_experts
from forebay.models.families.mamba2 import mamba2_spec


def describe(config: GraniteMoeHybridConfig) -> DecoderSpec:
    """Describe the whole model, with scaled embeddings and logits."""
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        embedding_scale=config.embedding_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


def _block(config: GraniteMoeHybridConfig, layer: int) -> BlockSpec:
    block = block_spec(config, layer, _mixer(config, layer), _feed_forward(config, layer))
    return replace(block, multiplier=config.residual_multiplier)


def _mixer(config: GraniteMoeHybridConfig, layer: int) -> PartSpec:
    if config.layer_types[layer] == LINEAR:
        return mamba2_spec(config, f"{layer_name(layer)}.mamba")
    return replace(attention_spec(config, layer, rope=config.has_rope), scale=config.attention_multiplier)


def _feed_forward(config: GraniteMoeHybridConfig, layer: int) -> PartSpec:
    shared = MlpSpec(
        name=f"{layer_name(layer)}.shared_mlp",
        hidden_size=config.hidden_size,
        intermediate_size=config.shared_intermediate_size,
        names=("input_linear", "output_linear"),
    )
    if config.experts is None:
        return shared
    name = f"{layer_name(layer)}.block_sparse_moe"
    return SumSpec(first=softmax_experts(config, config.experts, name, router="router", normalize=True), second=shared)

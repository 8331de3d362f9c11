"""Ling 3: Kimi delta attention, last in every group of layers latent attention with a gate for each head; experts."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.kimi_linear.config import KimiLinearConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.kimi_delta import KimiDeltaSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name
from forebay.models.deepseek_v3 import feed_forward, latent_attention_spec, latent_block


def describe(config: KimiLinearConfig) -> DecoderSpec:
    spec = decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])
    return replace(spec, embedding=replace(spec.embedding, names=("model.word_embeddings.weight",)))


def _block(config: KimiLinearConfig, layer: int) -> BlockSpec:
    mlp = feed_forward(config, layer, correction="gate.expert_bias")
    return latent_block(config, layer, _mixer(config, f"{layer_name(layer)}.attention", layer), mlp)


def _mixer(config: KimiLinearConfig, name: str, layer: int) -> PartSpec:
    if config.layer_types[layer] == "full_attention":
        return replace(latent_attention_spec(config, name), head_gate=True, output_name="dense")
    delta = config.delta
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=delta.num_heads,
        head_dim=delta.head_dim,
        width=delta.width,
        norm_eps=config.rms_norm_eps,
        low_rank=False,
        a_log_shape=(delta.num_heads,),
        lowest_log_decay=delta.lower_bound,
        output_name="dense",
    )

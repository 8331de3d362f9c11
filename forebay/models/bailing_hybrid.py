"""Ling 3: Kimi delta attention, last in every group of layers latent attention with a gate for each head; experts."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.model_config import ModelConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.kimi_delta import KimiDeltaSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name
from forebay.models.deepseek_v3 import feed_forward, latent_attention_spec, latent_block


def describe(config: ModelConfig) -> DecoderSpec:
    spec = decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])
    return replace(spec, embedding=replace(spec.embedding, names=("model.word_embeddings.weight",)))


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    mlp = feed_forward(config, layer, correction="gate.expert_bias")
    return latent_block(config, layer, _mixer(config, f"{layer_name(layer)}.attention", layer), mlp)


def _mixer(config: ModelConfig, name: str, layer: int) -> PartSpec:
    extra = config.extra
    if extra["layer_types"][layer] == "full_attention":
        return replace(latent_attention_spec(config, name), head_gate=True, output_name="dense")
    heads = extra["linear_num_heads"]
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=heads,
        head_dim=extra["linear_head_dim"],
        width=extra["linear_conv_kernel_dim"],
        norm_eps=config.rms_norm_eps,
        low_rank=False,
        a_log_shape=(heads,),
        lowest_log_decay=extra["kda_lower_bound"],
        output_name="dense",
    )

"""Kimi Linear: Kimi delta attention, and among every few such layers latent attention without positions; experts."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.model_config import ModelConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.kimi_delta import KimiDeltaSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name
from forebay.models.deepseek_v3 import feed_forward, latent_attention_spec, latent_block

_EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up and down


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    mlp = feed_forward(config, layer, expert_names=_EXPERT_NAMES)
    return latent_block(config, layer, _mixer(config, f"{layer_name(layer)}.self_attn", layer), mlp)


def _mixer(config: ModelConfig, name: str, layer: int) -> PartSpec:
    extra = config.extra
    if extra["layer_types"][layer] == "full_attention":
        return replace(latent_attention_spec(config, name), rope=None)
    heads = extra["linear_num_heads"]
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=heads,
        head_dim=extra["linear_head_dim"],
        width=extra["linear_conv_kernel_dim"],
        norm_eps=config.rms_norm_eps,
        low_rank=True,
        a_log_shape=(1, 1, heads, 1),
    )

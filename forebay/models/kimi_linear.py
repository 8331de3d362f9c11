"""Kimi Linear: Kimi delta attention, and among every few such layers latent attention without positions; experts."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.kimi_linear.config import KimiLinearConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.kimi_delta import KimiDeltaSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name
from forebay.models.deepseek_v3 import feed_forward, latent_attention_spec, latent_block

_EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up and down


def describe(config: KimiLinearConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: KimiLinearConfig, layer: int) -> BlockSpec:
    mlp = feed_forward(config, layer, expert_names=_EXPERT_NAMES)
    return latent_block(config, layer, _mixer(config, f"{layer_name(layer)}.self_attn", layer), mlp)


def _mixer(config: KimiLinearConfig, name: str, layer: int) -> PartSpec:
    if config.layer_types[layer] == "full_attention":
        return replace(latent_attention_spec(config, name), rope=None)
    delta = config.delta
    return KimiDeltaSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=delta.num_heads,
        head_dim=delta.head_dim,
        width=delta.width,
        norm_eps=config.rms_norm_eps,
        low_rank=True,
        a_log_shape=(1, 1, delta.num_heads, 1),
    )

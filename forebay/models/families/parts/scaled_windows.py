"""Granite's blocks with attention sinks, and rotary embeddings of a layer's own."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.scaled_windows import WindowedGraniteConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import DecoderSpec
from forebay.models.families.parts.multipliers import block, scaled, scaled_attention


def describe(config: WindowedGraniteConfig) -> DecoderSpec:
    """Describe the whole model: Granite with windows and sinks."""
    return scaled(config, config.multipliers, lambda layer: block(config, layer, _attention(config, layer)))


def _attention(config: WindowedGraniteConfig, layer: int) -> AttentionSpec:
    theta = config.rope_thetas[layer]
    rope = RopeSpec(config.head_dim, theta, config.rope_scaling) if theta else None
    return replace(scaled_attention(config, config.multipliers, layer), rope=rope, sinks=True)

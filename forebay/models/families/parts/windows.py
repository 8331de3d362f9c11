"""Attention in windows, with rotary embeddings there alone."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import SLIDING
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.models.decoder import attention_spec


def windowed_rope_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Describe attention that is rotated in layers with a window, and in all layers of a model without windows."""
    rotated = not config.sliding_window or config.layer_types[layer] == SLIDING
    return attention_spec(config, layer, qk_norm=QkNorm.HEAD, rope=rotated)

"""Attention with rotary embeddings before its norms."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.models.decoder import attention_spec


def rotated_first(config: ModelConfig, layer: int) -> AttentionSpec:
    """Describe attention that rotates queries and keys, then norms each head."""
    names = ("query_layernorm", "key_layernorm")
    return replace(attention_spec(config, layer, qk_norm=QkNorm.HEAD), rope_first=True, norm_names=names)

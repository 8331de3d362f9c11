"""Llama's block."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention and an MLP, each behind a norm."""
    return block_spec(config, layer, attention_spec(config, layer), mlp_spec(config, layer))

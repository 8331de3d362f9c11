"""Blocks whose norms are behind attention and MLP."""

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ModelConfig, layer: int, *, rope: bool = True) -> BlockSpec:
    """Describe a layer with norms behind its parts alone; queries and keys are normed over all heads at once."""
    return norms_behind(config, layer, attention_spec(config, layer, qk_norm=QkNorm.FULL, rope=rope))


def norms_behind(config: ModelConfig, layer: int, attention: AttentionSpec) -> BlockSpec:
    """Describe a layer of this attention and an MLP, each with a norm behind it and none before."""
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    return block_spec(config, layer, attention, mlp_spec(config, layer), before=(None, None), after=after)

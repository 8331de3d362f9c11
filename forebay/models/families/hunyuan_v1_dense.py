from __future__ import annotations

from dataclasses import replace

from forebay.families.model_config import ModelConfig
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with queries and keys normed by heads after their rotation."""
    return block_spec(config, layer, rotated_first(config, layer), mlp_spec(config, layer))


def rotated_first(config: ModelConfig, layer: int) -> AttentionSpec:
    """Describe attention that rotates queries and keys, then norms each head."""
    names = ("query_layernorm", "key_layernorm")
    return replace(attention_spec(config, layer, qk_norm=QkNorm.HEAD), rope_first=True, norm_names=names)

from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with queries and keys normed by heads."""
    return block_spec(config, layer, attention_spec(config, layer, qk_norm=QkNorm.HEAD), mlp_spec(config, layer))

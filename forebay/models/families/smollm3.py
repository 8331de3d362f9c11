from __future__ import annotations

from forebay.families.smollm3.config import SmolLM3Config
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: SmolLM3Config, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, without rotary embeddings where `has_rope` says so."""
    attention = attention_spec(config, layer, rope=config.has_rope[layer])
    return block_spec(config, layer, attention, mlp_spec(config, layer))

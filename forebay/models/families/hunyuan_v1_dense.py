from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import block_spec, mlp_spec
from forebay.models.families.parts.rotated_first import rotated_first


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with queries and keys normed by heads after their rotation."""
    return block_spec(config, layer, rotated_first(config, layer), mlp_spec(config, layer))

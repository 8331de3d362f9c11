from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import UP_DOWN, Activation
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with another activation and no gate."""
    mlp = replace(mlp_spec(config, layer), activation=Activation.RELU2, names=UP_DOWN)
    return block_spec(config, layer, attention_spec(config, layer), mlp)

from __future__ import annotations

from dataclasses import replace

from forebay.families.apertus.config import ApertusConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import UP_DOWN, Activation
from forebay.models.decoder import attention_spec, block_spec, mlp_spec


def block(config: ApertusConfig, layer: int) -> BlockSpec:
    """Describe a layer: Llama's, with norms of q and k by heads, and an xIELU without a gate."""
    numbers = config.activations[layer] if config.activations else None
    mlp = replace(mlp_spec(config, layer), activation=Activation.XIELU, names=UP_DOWN, xielu=numbers)
    attention = attention_spec(config, layer, qk_norm=QkNorm.HEAD)
    return block_spec(config, layer, attention, mlp, before=("attention_layernorm", "feedforward_layernorm"))

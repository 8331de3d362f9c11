from __future__ import annotations

from dataclasses import replace

from forebay.families.glm4.config import PartialRotaryConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import MlpSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec, rope_spec


def block(config: PartialRotaryConfig, layer: int) -> BlockSpec:
    """Describe a layer with norms before and behind each part, and neighbours as rotary pairs."""
    attention = replace(partly_rotated(config, layer), o_bias=False, interleaved=True)
    after = ("post_self_attn_layernorm", "post_mlp_layernorm")
    return block_spec(config, layer, attention, joined_mlp(config, layer), after=after)


def partly_rotated(config: PartialRotaryConfig, layer: int) -> AttentionSpec:
    """Describe attention that rotates the first `rotary_dim` dimensions of each head."""
    return replace(attention_spec(config, layer), rope=replace(rope_spec(config), dim=config.rotary_dim))


def joined_mlp(config: PartialRotaryConfig, layer: int) -> MlpSpec:
    """Describe an MLP whose gate and up are one matrix of the checkpoint."""
    return replace(mlp_spec(config, layer), names=("gate_up_proj", "down_proj"))

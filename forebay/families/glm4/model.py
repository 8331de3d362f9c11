from __future__ import annotations

from dataclasses import replace

from forebay.families.glm4.config import PartialRotaryConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import MlpSpec
from forebay.models.decoder import attention_spec, block_spec, mlp_spec, rope_spec


def block(config: PartialRotaryConfig, layer: int) -> BlockSpec:
    attention = replace(partly_rotated(config, layer), o_bias=False, interleaved=True)
    after = ("post_self_attn_layernorm", "post_mlp_layernorm")
    return block_spec(config, layer, attention, joined_mlp(config, layer), after=after)


def partly_rotated(config: PartialRotaryConfig, layer: int) -> AttentionSpec:
    return replace(attention_spec(config, layer), rope=replace(rope_spec(config), dim=config.rotary_dim))


def joined_mlp(config: PartialRotaryConfig, layer: int) -> MlpSpec:
    return replace(mlp_spec(config, layer), names=("gate_up_proj", "down_proj"))

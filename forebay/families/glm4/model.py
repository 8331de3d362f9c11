from __future__ import annotations

from dataclasses import replace

from forebay.families.glm4.config import PartialRotaryConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.blocks import SandwichSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import MlpSpec
from forebay.models.decoder import attention_spec, mlp_spec, norm_param, rope_spec


def block(config: PartialRotaryConfig, layer: int) -> BlockSpec:
    names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    before, after, mlp_before, mlp_after = (norm_param(config, layer, name) for name in names)
    return SandwichSpec(
        mixer=replace(partly_rotated(config, layer), o_bias=False, interleaved=True),
        mlp=joined_mlp(config, layer),
        mixer_norms=(before, after),
        mlp_norms=(mlp_before, mlp_after),
        norm_eps=config.rms_norm_eps,
    )


def partly_rotated(config: PartialRotaryConfig, layer: int) -> AttentionSpec:
    return replace(attention_spec(config, layer), rope=replace(rope_spec(config), dim=config.rotary_dim))


def joined_mlp(config: PartialRotaryConfig, layer: int) -> MlpSpec:
    return replace(mlp_spec(config, layer), names=("gate_up_proj", "down_proj"))

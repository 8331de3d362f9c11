from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import SLIDING
from forebay.families.mimo_v2_flash.config import MimoConfig
from forebay.families.parts.experts import DENSE
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MoeSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, mlp_spec
from forebay.models.families.parts.latent import grouped_router


def block(config: MimoConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention, and an MLP or experts."""
    return block_spec(config, layer, _attention(config, layer), _feed_forward(config, layer))


def _attention(config: MimoConfig, layer: int) -> AttentionSpec:
    kind = config.layer_types[layer]
    rope, in_window = config.ropes[kind], kind == SLIDING
    return replace(
        attention_spec(config, layer),
        o_bias=False,
        num_kv_heads=config.num_kv_heads * (2 if in_window else 1),
        sinks=in_window,
        rope=RopeSpec(rope.dim, rope.theta, rope.scaling),
        value_dim=config.value_dim,
        value_scale=config.value_scale,
    )


def _feed_forward(config: MimoConfig, layer: int) -> PartSpec:
    if config.mlp_layer_types[layer] == DENSE:
        return mlp_spec(config, layer)
    name, experts = f"{layer_name(layer)}.mlp", config.experts
    router = grouped_router(config, experts, name)
    return MoeSpec(name=name, router=router, intermediate_size=experts.intermediate_size)

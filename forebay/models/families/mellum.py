from __future__ import annotations

from dataclasses import replace

from forebay.families.mellum.config import MellumConfig
from forebay.families.parts.experts import DENSE
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import attention_spec, block_spec, draft_head_spec, layer_name, mlp_spec, softmax_experts


def block(config: MellumConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3's, with the rope of its kind of attention, and experts unless it is dense."""
    attention = replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        rope=RopeSpec(config.head_dim, *config.ropes[config.layer_types[layer]]),
    )
    return block_spec(config, layer, attention, _mlp(config, layer))


def draft_head(config: MellumConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    attention, mlp = config.draft_layer
    layers, mlps = (*config.layer_types, attention), (*config.mlp_layer_types, mlp)
    return draft_head_spec(config, block(replace(config, layer_types=layers, mlp_layer_types=mlps), config.num_layers))


def _mlp(config: MellumConfig, layer: int) -> PartSpec:
    if config.mlp_layer_types[layer] == DENSE:
        return mlp_spec(config, layer)
    name = f"{layer_name(layer)}.mlp"
    return softmax_experts(config, config.experts, name, router="gate", normalize=config.norm_topk_prob)

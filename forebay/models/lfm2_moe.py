"""LFM 2 with a mixture of experts in all layers but the first `num_dense_layers`."""

from __future__ import annotations

from forebay.families.lfm2_moe.config import Lfm2MoeConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MoeSpec
from forebay.layers.routing import SigmoidRouterSpec
from forebay.models.decoder import DecoderSpec, layer_name
from forebay.models.lfm2 import GATE_UP_DOWN, dense_mlp, lfm2_block, lfm_decoder

_EPSILON = 1e-6


def describe(config: Lfm2MoeConfig) -> DecoderSpec:
    return lfm_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: Lfm2MoeConfig, layer: int) -> BlockSpec:
    return lfm2_block(config, layer, _mlp(config, layer))


def _mlp(config: Lfm2MoeConfig, layer: int) -> PartSpec:
    if layer < config.num_dense_layers:
        return dense_mlp(config, layer)
    name, experts = f"{layer_name(layer)}.feed_forward", config.experts
    return MoeSpec(
        name=name,
        router=SigmoidRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=config.norm_topk_prob,
            correction=f"{name}.expert_bias" if config.use_expert_bias else "",
            epsilon=_EPSILON,
            scale=config.routed_scaling_factor,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
        names=GATE_UP_DOWN,
    )

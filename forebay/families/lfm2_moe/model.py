from __future__ import annotations

from forebay.families.lfm2.model import GATE_UP_DOWN, dense_mlp, lfm2_block, lfm_decoder
from forebay.families.lfm2_moe.config import Lfm2MoeConfig
from forebay.layers.build import PartSpec
from forebay.layers.mlp import MoeSpec
from forebay.layers.routing import SigmoidRouterSpec
from forebay.models.decoder import DecoderSpec, layer_name

_EPSILON = 1e-6


def describe(config: Lfm2MoeConfig) -> DecoderSpec:
    return lfm_decoder(config, [lfm2_block(config, i, _mlp(config, i)) for i in range(config.num_layers)])


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

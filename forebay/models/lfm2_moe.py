"""LFM 2 with a mixture of experts in all layers but the first `num_dense_layers`."""

from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MoeSpec
from forebay.layers.routing import SigmoidRouterSpec
from forebay.models.decoder import DecoderSpec, layer_name
from forebay.models.lfm2 import GATE_UP_DOWN, dense_mlp, lfm2_block, lfm_decoder

_EPSILON = 1e-6


def describe(config: ModelConfig) -> DecoderSpec:
    return lfm_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    return lfm2_block(config, layer, _mlp(config, layer))


def _mlp(config: ModelConfig, layer: int) -> PartSpec:
    extra = config.extra
    if layer < extra["num_dense_layers"]:
        return dense_mlp(config, layer)
    name = f"{layer_name(layer)}.feed_forward"
    return MoeSpec(
        name=name,
        router=SigmoidRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=extra["num_experts"],
            num_experts_per_tok=extra["num_experts_per_tok"],
            normalize=extra["norm_topk_prob"],
            correction=f"{name}.expert_bias" if extra["use_expert_bias"] else "",
            epsilon=_EPSILON,
            scale=extra["routed_scaling_factor"],
        ),
        hidden_size=config.hidden_size,
        intermediate_size=extra["moe_intermediate_size"],
        num_experts=extra["num_experts"],
        names=GATE_UP_DOWN,
    )

from __future__ import annotations

from dataclasses import replace

from forebay.families.gpt_oss.config import GptOssConfig
from forebay.layers.build import BlockSpec
from forebay.layers.clamped_moe import ClampedMoeSpec
from forebay.layers.routing import SoftmaxRouterSpec
from forebay.models.decoder import attention_spec, layer_name, pre_norm


def block(config: GptOssConfig, layer: int) -> BlockSpec:
    return pre_norm(config, layer, replace(attention_spec(config, layer), sinks=True), _experts(config, layer))


def _experts(config: GptOssConfig, layer: int) -> ClampedMoeSpec:
    experts, name = config.experts, f"{layer_name(layer)}.mlp"
    return ClampedMoeSpec(
        name=f"{name}.experts",
        router=SoftmaxRouterSpec(
            name=f"{name}.router",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=True,
            bias=True,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
    )

"""Qwen 3.5's language model with a mixture of experts, beside a gated one that all tokens share, in every layer."""

from __future__ import annotations

from forebay.families.qwen3_5_moe_text.config import Qwen35MoeConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.routing import SoftmaxRouterSpec
from forebay.layers.scalar_gate import ScalarGateSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, layer_name
from forebay.models.qwen3_5_text import delta_spec, qwen_block, qwen_decoder, separate_inputs


def describe(config: Qwen35MoeConfig) -> DecoderSpec:
    return qwen_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: Qwen35MoeConfig, layer: int) -> BlockSpec:
    delta = delta_spec(config, layer, separate_inputs(config))
    return qwen_block(config, layer, delta=delta, mlp=qwen_experts(config, layer, normalize=True))


def qwen_experts(config: Qwen35MoeConfig, layer: int, *, normalize: bool) -> PartSpec:
    experts, name = config.experts, f"{layer_name(layer)}.mlp"
    routed = MoeSpec(
        name=name,
        router=SoftmaxRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=normalize,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
    )
    shared = MlpSpec(
        name=f"{name}.shared_expert",
        hidden_size=config.hidden_size,
        intermediate_size=config.shared_intermediate_size,
    )
    gated = ScalarGateSpec(gate=f"{name}.shared_expert_gate", part=shared, hidden_size=config.hidden_size)
    return SumSpec(first=routed, second=gated)

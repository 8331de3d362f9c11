"""Qwen 3 with a mixture of experts: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""

from __future__ import annotations

from forebay.families.qwen3_moe.config import Qwen3MoeConfig
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.routing import SoftmaxRouterSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, mlp_spec, norm_param


def describe(config: Qwen3MoeConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: Qwen3MoeConfig, layer: int) -> BlockSpec:
    bias = config.attention_bias
    return PreNormSpec(
        mixer=attention_spec(config, layer, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.HEAD),
        mlp=_mlp(config, layer),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "post_attention_layernorm"),
        norm_eps=config.rms_norm_eps,
    )


def _mlp(config: Qwen3MoeConfig, layer: int) -> MlpSpec | MoeSpec:
    if layer not in config.expert_layers:
        return mlp_spec(config, layer)
    name, experts = f"{layer_name(layer)}.mlp", config.experts
    return MoeSpec(
        name=name,
        router=SoftmaxRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=config.norm_topk_prob,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
    )

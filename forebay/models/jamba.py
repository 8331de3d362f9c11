"""Jamba: Mamba mixers, with an attention layer without positions among every few; experts in every few layers."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.jamba.config import JambaConfig
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mamba1 import ScanNorm
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.params import vector
from forebay.layers.routing import SoftmaxRouterSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, norm_param
from forebay.models.mamba_mixers import mamba1_spec


def describe(config: JambaConfig) -> DecoderSpec:
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        norm=vector("model.final_layernorm.weight", config.hidden_size),
    )


def _block(config: JambaConfig, layer: int) -> BlockSpec:
    return PreNormSpec(
        mixer=_mixer(config, layer),
        mlp=_feed_forward(config, layer),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "pre_ff_layernorm"),
        norm_eps=config.rms_norm_eps,
    )


def _mixer(config: JambaConfig, layer: int) -> PartSpec:
    if config.layer_types[layer] == "linear_attention":
        mixer = mamba1_spec(config, f"{layer_name(layer)}.mamba")
        return replace(mixer, norm=ScanNorm.WEIGHTED, norm_eps=config.rms_norm_eps)
    return attention_spec(config, layer, rope=False)


def _feed_forward(config: JambaConfig, layer: int) -> PartSpec:
    name, experts = f"{layer_name(layer)}.feed_forward", config.experts
    if layer not in config.expert_layers:
        return MlpSpec(name=name, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size)
    return MoeSpec(
        name=name,
        router=SoftmaxRouterSpec(
            name=f"{name}.router",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=False,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_experts=experts.num_experts,
    )

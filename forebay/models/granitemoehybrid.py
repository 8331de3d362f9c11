"""Granite 4 hybrids: a Mamba-2 mixer or attention, an MLP that all tokens share, and experts beside it in some models.

Constants scale the embeddings, the logits, the attention's scores and what each part adds to the residual stream.
"""

from __future__ import annotations

from dataclasses import replace

from forebay.families.granitemoehybrid.config import GraniteMoeHybridConfig
from forebay.families.model_config import Experts
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.routing import SoftmaxRouterSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, norm_param
from forebay.models.mamba_mixers import mamba2_spec


def describe(config: GraniteMoeHybridConfig) -> DecoderSpec:
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        embedding_scale=config.embedding_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


def _block(config: GraniteMoeHybridConfig, layer: int) -> BlockSpec:
    shared = MlpSpec(
        name=f"{layer_name(layer)}.shared_mlp",
        hidden_size=config.hidden_size,
        intermediate_size=config.shared_intermediate_size,
        names=("input_linear", "output_linear"),
    )
    return PreNormSpec(
        mixer=_mixer(config, layer),
        mlp=shared if config.experts is None else SumSpec(first=_experts(config, config.experts, layer), second=shared),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "post_attention_layernorm"),
        norm_eps=config.rms_norm_eps,
        residual_multiplier=config.residual_multiplier,
    )


def _mixer(config: GraniteMoeHybridConfig, layer: int) -> PartSpec:
    if config.layer_types[layer] == "linear_attention":
        return mamba2_spec(config, f"{layer_name(layer)}.mamba")
    bias = config.attention_bias
    attention = attention_spec(config, layer, qkv_bias=bias, o_bias=bias, rope=config.has_rope)
    return replace(attention, scale=config.attention_multiplier)


def _experts(config: GraniteMoeHybridConfig, experts: Experts, layer: int) -> MoeSpec:
    name = f"{layer_name(layer)}.block_sparse_moe"
    return MoeSpec(
        name=name,
        router=SoftmaxRouterSpec(
            name=f"{name}.router",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=True,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
    )

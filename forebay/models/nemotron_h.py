"""Nemotron-H: every layer is one thing alone, a Mamba-2 mixer, attention without positions, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.model_config import ModelConfig
from forebay.layers.blocks import SingleSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.relu2 import Relu2MlpSpec, Relu2MoeSpec
from forebay.layers.routing import SigmoidRouterSpec
from forebay.models.decoder import DecoderSpec, attention_spec
from forebay.models.mamba_mixers import backbone_decoder, backbone_layer, backbone_norm, mamba2_spec


def describe(config: ModelConfig) -> DecoderSpec:
    return backbone_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    return SingleSpec(
        mixer=_mixer(config, layer),
        norm=backbone_norm(config, layer),
        norm_eps=config.rms_norm_eps,
    )


def _mixer(config: ModelConfig, layer: int) -> PartSpec:
    name = f"{backbone_layer(layer)}.mixer"
    match config.extra["layer_types"][layer]:
        case "linear_attention":
            return mamba2_spec(config, name)
        case "full_attention":
            return replace(attention_spec(config, layer, rope=False), name=name)
        case "mlp":
            return _mlp(config, name, config.intermediate_size)
        case _:
            return _experts(config, name)


def _mlp(config: ModelConfig, name: str, intermediate_size: int) -> Relu2MlpSpec:
    return Relu2MlpSpec(
        name=name, hidden_size=config.hidden_size, intermediate_size=intermediate_size, bias=config.mlp_bias
    )


def _experts(config: ModelConfig, name: str) -> Relu2MoeSpec:
    extra = config.extra
    return Relu2MoeSpec(
        name=name,
        router=SigmoidRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=extra["num_experts"],
            num_experts_per_tok=extra["num_experts_per_tok"],
            normalize=extra["norm_topk_prob"],
            correction=f"{name}.gate.e_score_correction_bias",
            epsilon=1e-20,
            scale=extra["routed_scaling_factor"],
            groups=extra["n_group"],
            best_groups=extra["topk_group"],
        ),
        shared=_mlp(config, f"{name}.shared_experts", extra["moe_shared_expert_intermediate_size"]),
        hidden_size=config.hidden_size,
        intermediate_size=extra["moe_intermediate_size"],
        num_experts=extra["num_experts"],
        latent_size=extra["moe_latent_size"],
        latent_bias=config.mlp_bias,
    )

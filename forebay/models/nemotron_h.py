"""Nemotron-H: every layer is one thing alone, a Mamba-2 mixer, attention without positions, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.nemotron_h.config import NemotronHConfig
from forebay.layers.blocks import SingleSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.relu2 import Relu2MlpSpec, Relu2MoeSpec
from forebay.layers.routing import SigmoidRouterSpec
from forebay.models.decoder import DecoderSpec, attention_spec
from forebay.models.mamba_mixers import backbone_decoder, backbone_layer, backbone_norm, mamba2_spec


def describe(config: NemotronHConfig) -> DecoderSpec:
    return backbone_decoder(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: NemotronHConfig, layer: int) -> BlockSpec:
    return SingleSpec(
        mixer=_mixer(config, layer),
        norm=backbone_norm(config, layer),
        norm_eps=config.rms_norm_eps,
    )


def _mixer(config: NemotronHConfig, layer: int) -> PartSpec:
    name = f"{backbone_layer(layer)}.mixer"
    match config.layer_types[layer]:
        case "linear_attention":
            return mamba2_spec(config, name)
        case "full_attention":
            return replace(attention_spec(config, layer, rope=False), name=name)
        case "mlp":
            return _mlp(config, name, config.intermediate_size)
        case _:
            return _experts(config, name)


def _mlp(config: NemotronHConfig, name: str, intermediate_size: int) -> Relu2MlpSpec:
    return Relu2MlpSpec(
        name=name, hidden_size=config.hidden_size, intermediate_size=intermediate_size, bias=config.mlp_bias
    )


def _experts(config: NemotronHConfig, name: str) -> Relu2MoeSpec:
    experts = config.experts
    assert experts is not None, "a layer of experts, and none in the configuration"
    return Relu2MoeSpec(
        name=name,
        router=SigmoidRouterSpec(
            name=f"{name}.gate",
            hidden_size=config.hidden_size,
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.per_token,
            normalize=experts.normalize,
            correction=f"{name}.gate.e_score_correction_bias",
            epsilon=1e-20,
            scale=experts.scale,
            groups=experts.groups,
            best_groups=experts.best_groups,
        ),
        shared=_mlp(config, f"{name}.shared_experts", experts.shared_size),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
        latent_size=experts.latent_size,
        latent_bias=config.mlp_bias,
    )

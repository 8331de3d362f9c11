from __future__ import annotations

from dataclasses import replace

from forebay.families.deepseek_v3.model import grouped_router
from forebay.families.mamba.model import backbone_decoder, mixer_name
from forebay.families.mamba2.model import mamba2_spec
from forebay.families.nemotron_h.config import MLP, NemotronHConfig
from forebay.families.transformer import FULL, LINEAR
from forebay.layers.build import PartSpec
from forebay.layers.relu2 import Relu2MlpSpec, Relu2MoeSpec
from forebay.models.decoder import DecoderSpec, attention_spec


def describe(config: NemotronHConfig) -> DecoderSpec:
    return backbone_decoder(config, [_mixer(config, layer) for layer in range(config.num_layers)])


def _mixer(config: NemotronHConfig, layer: int) -> PartSpec:
    name, kind = mixer_name(layer), config.layer_types[layer]
    if kind == LINEAR:
        return mamba2_spec(config, name)
    if kind == FULL:
        return replace(attention_spec(config, layer, rope=False), name=name)
    return _mlp(config, name, config.intermediate_size) if kind == MLP else _experts(config, name)


def _mlp(config: NemotronHConfig, name: str, intermediate_size: int) -> Relu2MlpSpec:
    return Relu2MlpSpec(
        name=name, hidden_size=config.hidden_size, intermediate_size=intermediate_size, bias=config.mlp_bias
    )


def _experts(config: NemotronHConfig, name: str) -> Relu2MoeSpec:
    experts = config.experts
    assert experts is not None, "a layer of experts, and none in the configuration"
    return Relu2MoeSpec(
        name=name,
        router=grouped_router(config, experts, name),
        shared=_mlp(config, f"{name}.shared_experts", experts.shared_size),
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        num_experts=experts.num_experts,
        latent_size=experts.latent_size,
        latent_bias=config.mlp_bias,
    )

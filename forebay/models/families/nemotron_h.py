from __future__ import annotations

from dataclasses import replace

from forebay.base.errors import ModelError
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.nemotron_h.config import DRAFT_LAYERS, MLP, NemotronHConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.mlp import UP_DOWN, Activation, MlpSpec, MoeSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import attention_spec, draft_head_spec
from forebay.models.families.parts.latent import grouped_router
from forebay.models.families.parts.mamba import DECODER as BACKBONE
from forebay.models.families.parts.mamba import backbone_block, mixer_name
from forebay.models.families.parts.mamba2 import mamba2_spec

DECODER = BACKBONE


def block(config: NemotronHConfig, layer: int) -> BlockSpec:
    """Describe a layer: a norm, and the one part that it has."""
    return backbone_block(config, layer, _mixer(config, layer))


def draft_head(config: NemotronHConfig) -> DraftHeadSpec:
    """Describe the two layers behind the model's own that draft tokens. Raises ModelError for a head of other
    layers."""
    if config.draft_layers != DRAFT_LAYERS:
        given = " and ".join(config.draft_layers) or "no"
        raise ModelError(f"a draft head of {given} layers is not supported: it must be {' and '.join(DRAFT_LAYERS)}")
    whole, first = replace(config, layer_types=(*config.layer_types, *DRAFT_LAYERS)), config.num_layers
    blocks = (block(whole, first + i) for i in range(len(DRAFT_LAYERS)))
    return draft_head_spec(config, *blocks, name=f"backbone.layers.{first}")


def _mixer(config: NemotronHConfig, layer: int) -> PartSpec:
    name, kind = mixer_name(layer), config.layer_types[layer]
    if kind == LINEAR:
        return mamba2_spec(config, name)
    if kind == FULL:
        return replace(attention_spec(config, layer, rope=False), name=name)
    return _mlp(config, name, config.intermediate_size) if kind == MLP else _experts(config, name)


def _mlp(config: NemotronHConfig, name: str, intermediate_size: int) -> MlpSpec:
    return MlpSpec(
        name=name,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        bias=config.mlp_bias,
        activation=Activation.RELU2,
        names=UP_DOWN,
    )


def _experts(config: NemotronHConfig, name: str) -> SumSpec:
    experts = config.experts
    assert experts is not None, "a layer of experts, and none in the configuration"
    routed = MoeSpec(
        name=name,
        router=grouped_router(config, experts, name),
        intermediate_size=experts.intermediate_size,
        activation=Activation.RELU2,
        names=UP_DOWN,
        latent_size=experts.latent_size,
        latent_bias=config.mlp_bias,
    )
    return SumSpec(first=routed, second=_mlp(config, f"{name}.shared_experts", experts.shared_size))

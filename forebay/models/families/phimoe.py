from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.wide_experts import EXPERT_PARTS
from forebay.families.phimoe.config import PhimoeConfig
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MoeSpec
from forebay.layers.norms import layer_norm_spec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, softmax_experts


def describe(config: PhimoeConfig) -> DecoderSpec:
    """Describe the whole model, whose norms are LayerNorms."""
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    norm = layer_norm_spec("model.norm", config.hidden_size, bias=True)
    return replace(decoder_spec(config, blocks), norm=norm, head_bias=config.head_bias)


def _block(config: PhimoeConfig, layer: int) -> BlockSpec:
    parts: dict[str, PartSpec] = {
        "input_layernorm": attention_spec(config, layer),
        "post_attention_layernorm": _experts(config, layer),
    }
    sublayers = (
        SublayerSpec(part=part, before=layer_norm_spec(f"{layer_name(layer)}.{name}", config.hidden_size, bias=True))
        for name, part in parts.items()
    )
    return ResidualSpec(sublayers=tuple(sublayers), norm_eps=config.rms_norm_eps)


def _experts(config: PhimoeConfig, layer: int) -> MoeSpec:
    name = f"{layer_name(layer)}.block_sparse_moe"
    experts = softmax_experts(config, config.experts, name, router="gate", normalize=False)
    return replace(experts, names=EXPERT_PARTS, router=replace(experts.router, jitter=config.jitter))

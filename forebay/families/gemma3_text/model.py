from __future__ import annotations

from dataclasses import replace

from forebay.families.gemma3_text.config import Gemma3Config
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.blocks import SandwichSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import Activation
from forebay.layers.params import TensorParam
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, norm_param

_NORM_OFFSET = 1.0  # norm weights are stored as differences from it


def describe(config: Gemma3Config) -> DecoderSpec:
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    spec = decoder_spec(config, blocks, norm_offset=_NORM_OFFSET)
    return replace(spec, embedding_scale=float(config.hidden_size) ** 0.5)


def _block(config: Gemma3Config, layer: int) -> BlockSpec:
    return SandwichSpec(
        mixer=_attention(config, layer),
        mlp=replace(mlp_spec(config, layer), activation=Activation.GELU_TANH),
        mixer_norms=(_norm(config, layer, "input_layernorm"), _norm(config, layer, "post_attention_layernorm")),
        mlp_norms=(
            _norm(config, layer, "pre_feedforward_layernorm"),
            _norm(config, layer, "post_feedforward_layernorm"),
        ),
        norm_eps=config.rms_norm_eps,
    )


def _norm(config: Gemma3Config, layer: int, name: str) -> TensorParam:
    return replace(norm_param(config, layer, name), offset=_NORM_OFFSET)


def _attention(config: Gemma3Config, layer: int) -> AttentionSpec:
    return replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        norm_offset=_NORM_OFFSET,
        rope=RopeSpec(config.head_dim, *config.ropes[config.layer_types[layer]]),
        scale=config.query_pre_attn_scalar**-0.5,
    )

"""SmolLM 3: some layers (every fourth by default) do without rotary embedding."""

from __future__ import annotations

from forebay.families.smollm3.config import SmolLM3Config
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, norm_param


def describe(config: SmolLM3Config) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: SmolLM3Config, layer: int) -> BlockSpec:
    bias, rope = config.attention_bias, config.has_rope[layer]
    return PreNormSpec(
        mixer=attention_spec(config, layer, qkv_bias=bias, o_bias=bias, rope=rope),
        mlp=mlp_spec(config, layer, bias=config.mlp_bias),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "post_attention_layernorm"),
        norm_eps=config.rms_norm_eps,
    )

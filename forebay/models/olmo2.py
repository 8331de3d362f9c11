"""OLMo 2: norms after attention and MLP instead of before, and q and k normed over all their heads together."""

from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import PostNormSpec
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, norm_param


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    bias = config.attention_bias
    return PostNormSpec(
        mixer=attention_spec(config, layer, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.FULL),
        mlp=mlp_spec(config, layer),
        mixer_norm=norm_param(config, layer, "post_attention_layernorm"),
        mlp_norm=norm_param(config, layer, "post_feedforward_layernorm"),
        norm_eps=config.rms_norm_eps,
    )

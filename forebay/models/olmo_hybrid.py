"""OLMo hybrids: gated delta nets behind a norm, and among every few of them attention before one, as in OLMo 2."""

from __future__ import annotations

from forebay.families.olmo_hybrid.config import OlmoHybridConfig
from forebay.layers.attention import QkNorm
from forebay.layers.blocks import PostNormSpec, PreNormSpec
from forebay.layers.build import BlockSpec
from forebay.layers.gated_delta import GatedDeltaSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, mlp_spec, norm_param

_DELTA_NORM_EPS = 1e-5  # whatever the other norms have: as in transformers


def describe(config: OlmoHybridConfig) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: OlmoHybridConfig, layer: int) -> BlockSpec:
    if config.layer_types[layer] == "linear_attention":
        return PreNormSpec(
            mixer=_delta_net(config, layer),
            mlp=mlp_spec(config, layer),
            mixer_norm=norm_param(config, layer, "input_layernorm"),
            mlp_norm=norm_param(config, layer, "post_attention_layernorm"),
            norm_eps=config.rms_norm_eps,
        )
    bias, rope = config.attention_bias, config.has_rope
    return PostNormSpec(
        mixer=attention_spec(config, layer, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.FULL, rope=rope),
        mlp=mlp_spec(config, layer),
        mixer_norm=norm_param(config, layer, "post_attention_layernorm"),
        mlp_norm=norm_param(config, layer, "post_feedforward_layernorm"),
        norm_eps=config.rms_norm_eps,
    )


def _delta_net(config: OlmoHybridConfig, layer: int) -> GatedDeltaSpec:
    delta = config.delta
    keys, values, heads = delta.key_size, delta.value_size, delta.num_value_heads
    return GatedDeltaSpec(
        name=f"{layer_name(layer)}.linear_attn",
        hidden_size=config.hidden_size,
        num_key_heads=delta.num_key_heads,
        num_value_heads=heads,
        key_head_dim=delta.key_head_dim,
        value_head_dim=delta.value_head_dim,
        width=delta.width,
        norm_eps=_DELTA_NORM_EPS,
        inputs=(
            ("q_proj", keys),
            ("k_proj", keys),
            ("v_proj", values),
            ("g_proj", values),
            ("b_proj", heads),
            ("a_proj", heads),
        ),
        kernels=("q_conv1d", "k_conv1d", "v_conv1d"),
        norm_name="o_norm",
        output_name="o_proj",
        most_beta=2.0 if config.linear_allow_neg_eigval else 1.0,
    )

"""Falcon-H1: every layer has attention and a Mamba-2 mixer side by side; constants scale most inputs and outputs."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.model_config import ModelConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mamba2 import GatedNorm, Mamba2Spec, Multipliers
from forebay.layers.mlp import MlpSpec
from forebay.layers.params import vector
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, norm_param
from forebay.models.mamba_mixers import mamba2_spec


def describe(config: ModelConfig) -> DecoderSpec:
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        norm=vector("model.final_layernorm.weight", config.hidden_size),
        embedding_scale=config.extra["embedding_multiplier"],
        logits_scale=config.extra["lm_head_multiplier"],
    )


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    gate_scale, scale = config.extra["mlp_multipliers"]
    return PreNormSpec(
        mixer=SumSpec(first=_attention(config, layer), second=_mamba(config, layer)),
        mlp=MlpSpec(
            name=f"{layer_name(layer)}.feed_forward",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            bias=config.mlp_bias,
            gate_scale=gate_scale,
            scale=scale,
        ),
        mixer_norm=norm_param(config, layer, "input_layernorm"),
        mlp_norm=norm_param(config, layer, "pre_ff_layernorm"),
        norm_eps=config.rms_norm_eps,
    )


def _attention(config: ModelConfig, layer: int) -> AttentionSpec:
    bias, extra = config.attention_bias, config.extra
    return replace(
        attention_spec(config, layer, qkv_bias=bias, o_bias=bias),
        input_scale=extra["attention_in_multiplier"],
        key_scale=extra["key_multiplier"],
        output_scale=extra["attention_out_multiplier"],
    )


def _mamba(config: ModelConfig, layer: int) -> Mamba2Spec:
    extra = config.extra
    gate, x, b, c, dt = extra["ssm_multipliers"]
    norm = GatedNorm(eps=config.rms_norm_eps, norm_first=extra["mamba_norm_before_gate"])
    return replace(
        mamba2_spec(config, f"{layer_name(layer)}.mamba"),
        norm=norm if extra["mamba_rms_norm"] else None,
        out_bias=extra["projectors_bias"],
        multipliers=Multipliers(
            inputs=extra["ssm_in_multiplier"],
            gate=gate,
            x=x,
            b=b,
            c=c,
            dt=dt,
            output=extra["ssm_out_multiplier"],
        ),
    )

"""Falcon-H1: every layer has attention and a Mamba-2 mixer side by side; constants scale most inputs and outputs."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.falcon_h1.config import FalconH1Config
from forebay.layers.attention import AttentionSpec
from forebay.layers.blocks import PreNormSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mamba2 import GatedNorm, Mamba2Spec, Multipliers
from forebay.layers.mlp import MlpSpec
from forebay.layers.params import vector
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, norm_param
from forebay.models.mamba_mixers import mamba2_spec


def describe(config: FalconH1Config) -> DecoderSpec:
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        norm=vector("model.final_layernorm.weight", config.hidden_size),
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
    )


def _block(config: FalconH1Config, layer: int) -> BlockSpec:
    gate_scale, scale = config.mlp_multipliers
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


def _attention(config: FalconH1Config, layer: int) -> AttentionSpec:
    bias = config.attention_bias
    return replace(
        attention_spec(config, layer, qkv_bias=bias, o_bias=bias),
        input_scale=config.attention_in_multiplier,
        key_scale=config.key_multiplier,
        output_scale=config.attention_out_multiplier,
    )


def _mamba(config: FalconH1Config, layer: int) -> Mamba2Spec:
    gate, x, b, c, dt = config.ssm_multipliers
    norm = GatedNorm(eps=config.rms_norm_eps, norm_first=config.mamba_norm_before_gate)
    return replace(
        mamba2_spec(config, f"{layer_name(layer)}.mamba"),
        norm=norm if config.mamba_rms_norm else None,
        out_bias=config.projectors_bias,
        multipliers=Multipliers(
            inputs=config.ssm_in_multiplier,
            gate=gate,
            x=x,
            b=b,
            c=c,
            dt=dt,
            output=config.ssm_out_multiplier,
        ),
    )

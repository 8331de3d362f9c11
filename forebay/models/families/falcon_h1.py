from __future__ import annotations

from dataclasses import replace

from forebay.families.falcon_h1.config import FalconH1Config
from forebay.layers.attention import AttentionSpec
from forebay.layers.build import BlockSpec
from forebay.layers.mamba2 import GatedNormSpec, Mamba2Spec, Multipliers
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, attention_spec, block_spec, decoder_spec, layer_name, mlp_spec
from forebay.models.families.parts.mamba2 import mamba2_spec
from forebay.models.families.parts.mamba_names import FINAL_NORM, NORMS


def describe(config: FalconH1Config) -> DecoderSpec:
    """Describe the whole model: hybrid layers, with scaled embeddings and logits."""
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)], norm=FINAL_NORM),
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
    )


def _block(config: FalconH1Config, layer: int) -> BlockSpec:
    gate_scale, scale = config.mlp_multipliers
    mixer = SumSpec(first=_attention(config, layer), second=_mamba(config, layer))
    mlp = replace(mlp_spec(config, layer, name="feed_forward"), gate_scale=gate_scale, scale=scale)
    return block_spec(config, layer, mixer, mlp, before=NORMS)


def _attention(config: FalconH1Config, layer: int) -> AttentionSpec:
    return replace(
        attention_spec(config, layer),
        input_scale=config.attention_in_multiplier,
        key_scale=config.key_multiplier,
        output_scale=config.attention_out_multiplier,
    )


def _mamba(config: FalconH1Config, layer: int) -> Mamba2Spec:
    gate, x, b, c, dt = config.ssm_multipliers
    norm = GatedNormSpec(eps=config.rms_norm_eps, norm_first=config.mamba_norm_before_gate)
    return replace(
        mamba2_spec(config, f"{layer_name(layer)}.mamba"),
        norm=norm if config.mamba_rms_norm else None,
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

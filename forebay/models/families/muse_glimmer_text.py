from __future__ import annotations

from dataclasses import replace

from forebay.families.muse_glimmer_text.config import MuseGlimmerConfig
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.blocks import ResidualSpec
from forebay.models.decoder import DecoderSpec, attention_spec, block_spec, decoder_spec, mlp_spec
from forebay.models.families.parts.gemma import NORM_OFFSET


def describe(config: MuseGlimmerConfig) -> DecoderSpec:
    """Describe the whole model, whose last norm's weights are stored as they are, unlike those of its layers."""
    return replace(
        decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)]),
        embedding_norm=True,
        logits_scale=config.logits_factor,
        logits_cap=config.logits_cap,
    )


def _block(config: MuseGlimmerConfig, layer: int) -> ResidualSpec:
    spec = block_spec(
        config,
        layer,
        _attention(config, layer),
        mlp_spec(config, layer),
        before=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
        norm_offset=NORM_OFFSET,
    )
    return replace(spec, sublayers=tuple(replace(part, after_eps=config.after_eps) for part in spec.sublayers))


def _attention(config: MuseGlimmerConfig, layer: int) -> AttentionSpec:
    return replace(
        attention_spec(config, layer, qk_norm=QkNorm.PLAIN, rope=config.has_rope[layer]),
        scale=config.query_factor * config.head_dim**-0.5,
        output_gate=True,
        gate_name="gate_proj",
    )

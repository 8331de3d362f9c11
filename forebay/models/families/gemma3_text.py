from __future__ import annotations

from dataclasses import replace

from forebay.families.gemma3_text.config import Gemma3Config
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import DecoderSpec, attention_spec
from forebay.models.families.parts.gemma import NORM_OFFSET, block, with_blocks


def describe(config: Gemma3Config) -> DecoderSpec:
    """Describe the whole model."""
    return with_blocks(config, [block(config, i, _attention(config, i)) for i in range(config.num_layers)])


def _attention(config: Gemma3Config, layer: int) -> AttentionSpec:
    return replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        norm_offset=NORM_OFFSET,
        rope=RopeSpec(config.head_dim, *config.ropes[config.layer_types[layer]]),
        scale=config.query_pre_attn_scalar**-0.5,
        bidirectional=True,
    )

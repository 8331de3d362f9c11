from __future__ import annotations

from dataclasses import replace

from forebay.families.gemma2.config import Gemma2Config
from forebay.layers.attention import AttentionSpec
from forebay.models.decoder import DecoderSpec, attention_spec
from forebay.models.families.parts import gemma as gemma3_text


def describe(config: Gemma2Config) -> DecoderSpec:
    """Describe the whole model: as Gemma 3 without norms of queries and keys, and with caps."""
    blocks = [gemma3_text.block(config, layer, _attention(config, layer)) for layer in range(config.num_layers)]
    return replace(gemma3_text.with_blocks(config, blocks), logits_cap=config.logits_cap)


def _attention(config: Gemma2Config, layer: int) -> AttentionSpec:
    plain, scale = attention_spec(config, layer), config.query_pre_attn_scalar**-0.5
    return replace(plain, scale=scale, softcap=config.scores_cap)

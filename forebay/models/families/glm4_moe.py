from __future__ import annotations

from dataclasses import replace

from forebay.families.glm4_moe.config import Glm4MoeConfig
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.build import BlockSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.models.decoder import attention_spec, block_spec, draft_head_spec, rope_spec
from forebay.models.families.parts.latent import feed_forward, with_draft_layer


def block(config: Glm4MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention that rotates part of each head, and an MLP or experts."""
    return block_spec(config, layer, _attention(config, layer), feed_forward(config, layer))


def draft_head(config: Glm4MoeConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return draft_head_spec(config, block(with_draft_layer(config), config.num_layers))


def _attention(config: Glm4MoeConfig, layer: int) -> AttentionSpec:
    attention = attention_spec(config, layer, qk_norm=QkNorm.HEAD if config.qk_norm else QkNorm.NONE)
    return replace(attention, rope=replace(rope_spec(config), dim=config.rotary_dim), o_bias=False)

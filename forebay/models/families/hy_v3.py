from __future__ import annotations

from forebay.families.parts.experts import GroupedConfig
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.models.decoder import attention_spec, block_spec, draft_head_spec
from forebay.models.families.parts.latent import feed_forward, with_draft_layer


def block(config: GroupedConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3's attention, and an MLP or experts, under the names of the hub's files."""
    experts = feed_forward(config, layer, router="router.gate", correction="expert_bias", shared="shared_mlp")
    return block_spec(config, layer, attention_spec(config, layer, qk_norm=QkNorm.HEAD), experts)


def draft_head(config: GroupedConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return draft_head_spec(config, block(with_draft_layer(config), config.num_layers))

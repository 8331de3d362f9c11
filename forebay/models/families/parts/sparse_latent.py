"""Latent attention over selected tokens."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.sparse_latent import FULL_INDEXER, SparseLatentConfig
from forebay.layers.build import BlockSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.indexer import IndexerSpec
from forebay.layers.latent_attention import LatentAttentionSpec
from forebay.models.decoder import block_spec, draft_head_spec, layer_name, rope_spec
from forebay.models.families.parts import latent as deepseek_v3


def block(config: SparseLatentConfig, layer: int) -> BlockSpec:
    """Describe a layer: latent attention over selected tokens, and an MLP or experts."""
    return block_spec(config, layer, sparse_attention_spec(config, layer), deepseek_v3.feed_forward(config, layer))


def draft_head(config: SparseLatentConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens, with an indexer of its own."""
    drafting = replace(deepseek_v3.with_draft_layer(config), indexer_types=(*config.indexer_types, FULL_INDEXER))
    return draft_head_spec(config, block(drafting, config.num_layers))


def sparse_attention_spec(config: SparseLatentConfig, layer: int) -> LatentAttentionSpec:
    """Describe a layer's latent attention, with an indexer or the selection of a layer before it."""
    dense = deepseek_v3.latent_attention_spec(config, f"{layer_name(layer)}.self_attn")
    if config.indexer_types[layer] != FULL_INDEXER:
        return replace(dense, shares_selection=True)
    indexer = IndexerSpec(
        name="indexer",
        hidden_size=config.hidden_size,
        q_rank=config.latent.q_rank,
        index=config.index,
        rope=rope_spec(config),
    )
    return replace(dense, indexer=indexer)

from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import LINEAR
from forebay.families.glm5_next_text.config import PooledConfig
from forebay.families.parts.sparse_latent import FULL_INDEXER
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.latent_attention import LatentAttentionSpec
from forebay.layers.pooled_indexer import PooledIndexerSpec
from forebay.models.decoder import DecoderSpec, block_spec, decoder_spec, draft_head_spec, layer_name
from forebay.models.families.parts.kimi_delta import kimi_delta_spec
from forebay.models.families.parts.latent import feed_forward, latent_attention_spec, with_draft_layer
from forebay.models.families.parts.streams import Streamed, streamed_block, streams_spec


def describe(config: PooledConfig) -> DecoderSpec:
    """Describe the model: several residual streams, whose mean is what the head is given."""
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    return replace(decoder_spec(config, blocks), streams=streams_spec(config, config.hyper))


def _block(config: PooledConfig, layer: int) -> BlockSpec:
    mlp = feed_forward(config, layer, limit=config.limit)
    parts = (
        Streamed(_mixer(config, layer), "input_layernorm", "hc_attn_"),
        Streamed(mlp, "post_attention_layernorm", "hc_ffn_"),
    )
    return streamed_block(config, layer, parts, streams_spec(config, config.hyper))


def draft_head(config: PooledConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens: it has one residual stream, and attends to all
    tokens. The files have an indexer for it, whose selection has all of the first `index_topk` tokens."""
    layer = config.num_layers
    drafting = with_draft_layer(config)
    attention = _dense_attention(drafting, f"{layer_name(layer)}.self_attn")
    return draft_head_spec(
        config, block_spec(drafting, layer, attention, feed_forward(drafting, layer, limit=config.limit))
    )


def _mixer(config: PooledConfig, layer: int) -> PartSpec:
    name = f"{layer_name(layer)}.self_attn"
    if config.layer_types[layer] == LINEAR:
        return kimi_delta_spec(config, name, low_rank=True, a_log_shape=(config.delta.num_heads,))
    return _attention(config, layer, name)


def _dense_attention(config: PooledConfig, name: str) -> LatentAttentionSpec:
    return replace(latent_attention_spec(config, name), rope=None, norm_eps=config.rms_norm_eps)


def _attention(config: PooledConfig, layer: int, name: str) -> LatentAttentionSpec:
    """Latent attention without positions, with an indexer of pools or the selection of the layer before."""
    dense = _dense_attention(config, name)
    if config.indexer_types[layer] != FULL_INDEXER:
        return replace(dense, shares_selection=True)
    indexer = PooledIndexerSpec(
        name="indexer", hidden_size=config.hidden_size, q_rank=config.latent.q_rank, index=config.index
    )
    return replace(dense, indexer=indexer)

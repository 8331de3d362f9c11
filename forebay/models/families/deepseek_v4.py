from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.families.config.transformer import SLIDING
from forebay.families.deepseek_v4.config import HASHED, ROUTED, SPARSE, CompressedConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.compressed_attention import CompressedAttentionSpec, EntryIndexerSpec
from forebay.layers.compressor import CompressorSpec
from forebay.layers.draft_head import StreamedDraftHeadSpec
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.params import vector
from forebay.layers.rotary import RopeSpec
from forebay.layers.streams import StreamsSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name, router_spec
from forebay.models.families.parts.streams import Streamed, streamed_block, streams_spec
from forebay.ops import Scoring

_EPSILON: Final = 1e-20
_EXPERT: Final = ("w1", "w3", "w2")


def describe(config: CompressedConfig) -> DecoderSpec:
    """Describe the model: several residual streams around layers of compressed attention and experts."""
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    return replace(decoder_spec(config, blocks), streams=_streams(config))


def draft_head(config: CompressedConfig) -> StreamedDraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens: it reads a window of tokens, without entries."""
    name, layer = layer_name(config.num_layers), config.num_layers
    drafting = replace(
        config,
        layer_types=(*config.layer_types, SLIDING),
        mlp_layer_types=(*config.mlp_layer_types, ROUTED),
    )
    return StreamedDraftHeadSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_streams=config.hyper.num_streams,
        block=_block(drafting, layer),
        streams=streams_spec(config, config.hyper, name=f"{name}.hc_head_"),
        norm=vector(f"{name}.shared_head.norm.weight", config.hidden_size),
        norm_eps=config.rms_norm_eps,
    )


def _streams(config: CompressedConfig) -> StreamsSpec:
    return streams_spec(config, config.hyper, name="model.hc_head.hc_")


def _block(config: CompressedConfig, layer: int) -> BlockSpec:
    parts = (
        Streamed(_attention(config, layer), "attn_norm", "hc_attn_"),
        Streamed(_feed_forward(config, layer), "ffn_norm", "hc_ffn_"),
    )
    return streamed_block(config, layer, parts, _streams(config))


def _attention(config: CompressedConfig, layer: int) -> CompressedAttentionSpec:
    kind = config.layer_types[layer]
    theta, scaling = (config.rope_theta, config.rope_scaling) if kind == SLIDING else config.compress_rope
    plain = CompressedAttentionSpec(
        name=f"{layer_name(layer)}.attn",
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        q_rank=config.q_rank,
        window=config.sliding_window,
        rope=RopeSpec(config.rope_dim, theta, scaling),
        groups=config.output_groups,
        output_rank=config.output_rank,
        norm_eps=config.rms_norm_eps,
    )
    if kind == SLIDING:
        return plain
    compressor = CompressorSpec(
        name="compressor",
        hidden_size=config.hidden_size,
        size=config.head_dim,
        rate=config.rates[kind],
        overlap=kind == SPARSE,
        rope=plain.rope,
        norm_eps=config.rms_norm_eps,
    )
    if kind != SPARSE:
        return replace(plain, compressor=compressor)
    indexer = EntryIndexerSpec(
        name="indexer",
        hidden_size=config.hidden_size,
        q_rank=config.q_rank,
        index=config.index,
        compressor=replace(compressor, size=config.index.head_dim),
    )
    return replace(plain, compressor=compressor, indexer=indexer)


def _feed_forward(config: CompressedConfig, layer: int) -> PartSpec:
    """Experts, chosen by a router or by the token's id, beside a shared one."""
    name, experts = f"{layer_name(layer)}.ffn", config.experts
    hashed = config.mlp_layer_types[layer] == HASHED
    router = router_spec(
        config,
        experts,
        f"{name}.gate",
        Scoring.SQRT_SOFTPLUS,
        normalize=True,
        epsilon=_EPSILON,
        scale=experts.scale,
        correction="" if hashed else f"{name}.gate.bias",
    )
    if hashed:
        router = replace(router, table=f"{name}.gate.tid2eid", vocab_size=config.vocab_size)
    routed = MoeSpec(
        name=name, router=router, intermediate_size=experts.intermediate_size, names=_EXPERT, limit=experts.limit
    )
    shared = MlpSpec(
        name=f"{name}.shared_experts",
        hidden_size=config.hidden_size,
        intermediate_size=experts.intermediate_size,
        names=_EXPERT,
        limit=experts.limit,
    )
    return SumSpec(first=routed, second=shared)

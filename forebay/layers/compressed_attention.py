"""Attention over a window of tokens and compressed entries of all tokens before, with one softmax.

DeepSeek-V4, section 2.3; checked against transformers' `deepseek_v4`. Heads share one key per token, which is its
value, too: values are rotated with the keys, and outputs rotated back at the query's position.

Shape letters: T tokens, H hidden size, Hq heads, D their size, G groups of heads, Q of the queries' latent vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from forebay.families.base.mixers import Index
from forebay.layers.build import Parts
from forebay.layers.compressor import Compressor, CompressorSpec, turned
from forebay.layers.context import ForwardContext
from forebay.layers.params import in_order
from forebay.layers.rotary import RopeSpec
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.experts import HeadWeights
from forebay.pools.cache_spec import SharedWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryIndexerSpec:
    """An indexer selects the entries that are read, by keys of entries of its own."""

    name: str
    hidden_size: int
    q_rank: int
    index: Index
    compressor: CompressorSpec

    def build(self, parts: Parts) -> EntryIndexer:
        """Return the part with its weights."""
        return EntryIndexer(self, parts)


class EntryIndexer:
    """Keeps a key of each entry, and selects `top_k` entries for each query."""

    def __init__(self, spec: EntryIndexerSpec, parts: Parts) -> None:
        parts, index, rope = parts.within(spec.name), spec.index, spec.compressor.rope
        self._ops, self._index, self._rate = parts.ops, index, spec.compressor.rate
        self._keys = spec.compressor.build(parts)
        self._cos_sin = parts.rope(rope)
        rows = turned(index.head_dim, rope.dim, count=index.num_heads)
        self._q_layer = parts.linear({"wq_b": index.num_heads * index.head_dim}, spec.q_rank, rows=rows)
        weights = parts.without_adapters.linear({"weights_proj": index.num_heads}, spec.hidden_size, min_bits=16)
        self._weights = weights.weight

    def __call__(self, ctx: ForwardContext, x: Tensor, q_latent: Tensor) -> PagedKv:
        """x [T, H], q_latent [T, Q], normed -> of the entries that each query sees those that it reads. Writes the keys
        of the entries of the step. Where a selection failed the length is -1."""
        ops, index = self._ops, self._index
        seen = self._keys(ctx, x)
        q = self._q_layer(ctx, q_latent).view(len(x), index.num_heads, index.head_dim)
        ops.attention.apply_rope(q, q[:, :0], ctx.positions, self._cos_sin)
        weights = ops.linear.apply_f32(x, self._weights)
        positions, counts = ops.selection.select_tokens(q, weights, self._keys.entries(ctx), seen, index.top_k)
        return ops.selection.token_pages(positions, counts, seen).with_lens(
            ops.compression.selected_lens(seen.seq_lens, counts)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttentionSpec:
    """`rope` is of the last entries of heads, in neighbouring pairs. `compressor` None: the window is all that is read;
    `indexer` None: all entries are. Outputs of heads are projected in `groups`, each to `output_rank` entries."""

    name: str
    hidden_size: int
    num_heads: int
    head_dim: int
    q_rank: int
    window: int
    rope: RopeSpec
    groups: int
    output_rank: int
    norm_eps: float
    compressor: CompressorSpec | None = None
    indexer: EntryIndexerSpec | None = None

    def build(self, parts: Parts) -> CompressedAttention:
        """Return the part with its weights."""
        return CompressedAttention(self, parts)


class CompressedAttention:
    """Attention of one layer; x [T, H] -> [T, H]."""

    def __init__(self, spec: CompressedAttentionSpec, parts: Parts) -> None:
        parts = parts.within(spec.name)
        self._ops, self._spec, self._scale = parts.ops, spec, 1 / math.sqrt(spec.head_dim)
        heads, size, order = spec.num_heads, spec.head_dim, turned(spec.head_dim, spec.rope.dim)
        self._window = parts.keep(SharedWindow(head_dim=size, window=spec.window))
        self._compressor: Compressor | None = None if spec.compressor is None else spec.compressor.build(parts)
        self._indexer = None if spec.indexer is None else spec.indexer.build(parts)
        self._cos_sin = parts.rope(spec.rope)
        self._q_a = parts.linear({"wq_a": spec.q_rank}, spec.hidden_size)
        self._q_a_norm = parts.tensor("q_norm.weight", spec.q_rank)
        self._q_b = parts.linear({"wq_b": heads * size}, spec.q_rank, rows=turned(size, spec.rope.dim, count=heads))
        self._kv = parts.linear({"wkv": size}, spec.hidden_size, rows=order)
        self._kv_norm = parts.tensor("norm.weight", size, change=lambda weight: in_order(weight, order))
        self._ones = parts.ones(size)
        self._sinks = parts.tensor("attn_sink", heads, float32=True)
        self._o_a = _grouped(spec, parts)
        self._o_b = parts.linear({"wo_b": spec.hidden_size}, spec.groups * spec.output_rank)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Writes the keys of the step's tokens and the entries of its blocks, then attends."""
        ops, spec = self._ops, self._spec
        q_latent = ops.norms.rms_norm(self._q_a(ctx, x), self._q_a_norm, spec.norm_eps)
        q = self._q_b(ctx, q_latent).view(len(x), spec.num_heads, spec.head_dim)
        q = ops.norms.rms_norm(q, self._ones, spec.norm_eps)
        k = ops.norms.rms_norm(self._kv(ctx, x), self._kv_norm, spec.norm_eps).unsqueeze(1)
        paged, cache = ctx.pages(ctx.cache.specs[self._window].kind), ctx.cache.kv(self._window)
        ops.attention.rope_and_store_kv(q, k, k, ctx.positions, self._cos_sin, cache, paged.out_cache_loc)
        if self._compressor is None:
            out = ops.attention.paged_attention(
                q, cache, paged, scale=self._scale, sliding_window=spec.window, sinks=self._sinks
            )
        else:
            entries = self._compressor.entries(ctx), self._read(ctx, self._compressor, x, q_latent)
            out = ops.compression.compressed_attention(
                q, ctx.positions, (cache, paged), entries, scale=self._scale, window=spec.window, sinks=self._sinks
            )
        ops.compression.unrotate(out, ctx.positions, self._cos_sin)
        grouped = ops.experts.linear_heads(out.view(len(x), spec.groups, -1), self._o_a)
        return self._o_b(ctx, grouped.flatten(1))

    def _read(self, ctx: ForwardContext, compressor: Compressor, x: Tensor, q_latent: Tensor) -> PagedKv:
        """Return the entries that each query reads, with those that the step's tokens end."""
        seen = compressor(ctx, x)
        return seen if self._indexer is None else self._indexer(ctx, x, q_latent)


def _grouped(spec: CompressedAttentionSpec, parts: Parts) -> HeadWeights:
    """One linear layer for each group of heads; its inputs are in the order of rotated heads."""
    heads = spec.num_heads // spec.groups
    width, order = heads * spec.head_dim, turned(spec.head_dim, spec.rope.dim, count=heads)
    stored = parts.values("wo_a.weight", spec.groups * spec.output_rank, width)
    groups = in_order(stored, order).view(spec.groups, spec.output_rank, width)
    return parts.ops.experts.pack_heads([parts.ops.linear.pack(group.contiguous()) for group in groups])

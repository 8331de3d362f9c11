"""Multi-head latent attention: all heads share one short vector per token, and the cache keeps nothing else.

DeepSeek-V2, arXiv 2405.04434, section 2.1, in the absorbed form: W_UK is absorbed into the queries and W_UV into the
output, so that no head's keys and values are ever made.

Shape letters: T tokens, H hidden size, Hq heads, N dimensions of a head's key without and R with positions, C of the
latent vector, Dv of a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forebay.families.base.mixers import Latent
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.indexer import IndexerSpec
from forebay.layers.linear import Linear
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import Rows, rows_of_blocks, rows_of_heads
from forebay.layers.pooled_indexer import PooledIndexerSpec
from forebay.layers.rotary import QueryScaleSpec, RopeSpec
from forebay.layers.selection import Selection
from forebay.pools.cache_spec import LatentAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """`rope` None: the R dimensions, if there are any, are not rotated. `norm_eps` is that of the norms of both latent
    vectors: mostly this default, whatever the rest of a model has, as in transformers. `bias`: of the layers from the
    input to latent vectors, and of the output. `head_gate`: each head's output is multiplied by sigmoid(g_proj(x)).
    `query_scale` None if queries are not scaled by their position.

    `indexer` selects the tokens that are read, None for all; with `shares_selection` they are those of the last layer
    before this one that has an indexer."""

    name: str
    hidden_size: int
    num_heads: int
    latent: Latent
    scale: float
    rope: RopeSpec | None
    bias: bool = False
    head_gate: bool = False
    query_scale: QueryScaleSpec | None = None
    indexer: IndexerSpec | PooledIndexerSpec | None = None
    shares_selection: bool = False
    output_name: str = "o_proj"
    norm_eps: float = 1e-6
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> LatentAttentionLayer:
        return LatentAttentionLayer(self, parts)


class LatentAttentionLayer:
    """Multi-head latent attention in absorbed form; the cache keeps rank + rope values per token."""

    def __init__(self, spec: LatentAttentionSpec, parts: Parts) -> None:
        parts, ops, latent, heads = parts.within(spec.name), parts.ops, spec.latent, spec.num_heads
        own = parts.share.of(heads, "query heads")
        self._ops, self._latent, self._heads, self._norm_eps = ops, latent, len(own), spec.norm_eps
        self._exchange = parts.share.exchange
        self._indexer = None if spec.indexer is None else spec.indexer.build(parts)
        self._shares_selection = spec.shares_selection
        sparse = spec.indexer is not None or spec.shares_selection
        cached = LatentAttention(rank=latent.rank, rope_dim=latent.rope_dim, sparse=sparse)
        self._attend = PagedAttention(parts, parts.keep(cached), scale=spec.scale, query_scale=spec.query_scale)
        self._cos_sin = None if spec.rope is None else parts.rope(spec.rope)
        self._q_layers = _q_layers(spec, parts, own)
        self._kv_layer = parts.linear(
            {"kv_a_proj_with_mqa": latent.rank + latent.rope_dim},
            spec.hidden_size,
            bias=spec.bias,
            rows=(range(latent.rank), *_rotary_rows(latent, latent.rank)),
        )
        self._output = parts.gathered(spec.output_name, spec.hidden_size, heads * latent.value_dim, bias=spec.bias)
        of_rank = parts.share.part(own)
        self._gate = parts.linear({"g_proj": heads}, spec.hidden_size, own=of_rank) if spec.head_gate else None
        size = latent.nope_dim + latent.value_dim
        rows = parts.share.part(*rows_of_heads((heads, own, size)))
        expansion = parts.values("kv_b_proj.weight", heads * size, latent.rank, own=rows)
        expansion = expansion.view(len(own), size, latent.rank)
        keys, values = torch.split(expansion, [latent.nope_dim, latent.value_dim], dim=1)
        self._into_latent = ops.experts.pack_heads(
            [ops.linear.pack(head) for head in keys.transpose(1, 2).contiguous()]
        )
        self._out_of_latent = ops.experts.pack_heads([ops.linear.pack(head) for head in values])
        self._kv_norm = parts.tensor("kv_a_layernorm.weight", latent.rank)
        self._q_norm = parts.tensor("q_a_layernorm.weight", latent.q_rank) if latent.q_rank else None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. Writes the latent vectors of the step's tokens, then attends over all of the rows'."""
        ops = self._ops
        q_latent = self._q_latent(ctx, x)
        q_nope, q_rope = self._queries(ctx, q_latent)
        latent, k_rope = self._keys(ctx, x)
        if self._cos_sin is not None:
            ops.attention.apply_rope(q_rope, k_rope, ctx.positions, self._cos_sin)
        q = ops.elementwise.concat([ops.experts.linear_heads(q_nope, self._into_latent), q_rope])
        read = self._attend(
            ctx, q, ops.elementwise.concat([latent, k_rope]), latent, selected=self._selected(ctx, x, q_latent)
        )
        out = ops.experts.linear_heads(read, self._out_of_latent).flatten(1)
        if self._gate is not None:
            out = ops.elementwise.mul_sigmoid(out, self._gate(ctx, x))
        return self._output(ctx, self._exchange.gather(out))

    def _selected(self, ctx: ForwardContext, x: Tensor, q_latent: Tensor) -> Selection | None:
        """Return the tokens that are read; None for all."""
        if self._indexer is not None:
            return self._indexer(ctx, x, q_latent)
        return ctx.carried.selection if self._shares_selection else None

    def _q_latent(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> the queries' latent vectors; x if there are none."""
        if self._q_norm is None:
            return x
        return self._ops.norms.rms_norm(self._q_layers[0](ctx, x), self._q_norm, self._norm_eps)

    def _queries(self, ctx: ForwardContext, q_latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [T, Hq, N] and [T, Hq, R] of what `_q_latent` returns."""
        heads, sizes = self._heads, (self._latent.nope_dim, self._latent.rope_dim)
        q = self._q_layers[-1](ctx, q_latent)
        nope, rope = torch.split(q, [heads * size for size in sizes], dim=-1)
        return nope.view(len(q), heads, sizes[0]), rope.view(len(q), heads, sizes[1])

    def _keys(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the latent vectors [T, 1, C] and what all heads' keys have besides [T, 1, R]."""
        sizes = [self._latent.rank, self._latent.rope_dim]
        latent, rope = torch.split(self._kv_layer(ctx, x), sizes, dim=-1)
        return self._ops.norms.rms_norm(latent, self._kv_norm, self._norm_eps).unsqueeze(1), rope.unsqueeze(1)


def _q_layers(spec: LatentAttentionSpec, parts: Parts, heads_of_rank: range) -> tuple[Linear, ...]:
    """From the input to q, of all heads of a rank first N dimensions each, then R each."""
    latent, heads, size = spec.latent, spec.num_heads, spec.latent.nope_dim + spec.latent.rope_dim
    nope = rows_of_blocks(count=heads, block=size, first=0, size=latent.nope_dim)
    rows = (*nope, *(rows for head in range(heads) for rows in _rotary_rows(latent, head * size + latent.nope_dim)))
    blocks = ((heads, heads_of_rank, dim) for dim in (latent.nope_dim, latent.rope_dim))
    own = parts.share.part(*rows_of_heads(*blocks))
    if not latent.q_rank:
        return (parts.linear({"q_proj": heads * size}, spec.hidden_size, rows=rows, own=own),)
    return (
        parts.linear({"q_a_proj": latent.q_rank}, spec.hidden_size, bias=spec.bias),
        parts.linear({"q_b_proj": heads * size}, latent.q_rank, rows=rows, own=own),
    )


def _rotary_rows(latent: Latent, first: int) -> Rows:
    """Halves are paired here: the first of each pair, then the second ones."""
    stop = first + latent.rope_dim
    if not latent.rope_dim:
        return ()
    return (range(first, stop, 2), range(first + 1, stop, 2)) if latent.interleaved else (range(first, stop),)

"""Indexers of sparse attention over pools: they score blocks of tokens by a mean of their keys, and select the best.

GLM-5.3-Flash and Qwen 4; checked against transformers' `glm5_next` and `qwen4_exp`. The constant factors of the scores
are left out: they change no order.

Shape letters: T tokens, H hidden size, Q of the queries' latent vector, Hi heads of the indexer, Di their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from forebay.families.base.mixers import PooledIndex
from forebay.layers.build import Parts
from forebay.layers.compressor import BlockEntries
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.params import TensorParam
from forebay.layers.rotary import RopeSpec
from forebay.layers.selection import Selection
from forebay.ops import Ops
from forebay.ops.reference.attention import KvCache, PagedKv

_NORM_EPS: Final = 1e-6  # of the keys' norm, whatever the rest of a model has


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledIndexerSpec:
    """`q_rank` is Q. Nothing is rotated."""

    name: str
    hidden_size: int
    q_rank: int
    index: PooledIndex
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> PooledIndexer:
        """Return the indexer with its weights."""
        return PooledIndexer(self, parts)


class PooledIndexer:
    """Keeps a key of each pool, a mean of its tokens' keys by learned weights. For each query it selects the pools with
    `top_k` tokens, and the tokens behind the last whole pool."""

    def __init__(self, spec: PooledIndexerSpec, parts: Parts) -> None:
        parts, index, size = parts.within(spec.name), spec.index, spec.index.head_dim
        self._ops, self._index = parts.ops, index
        self._pools = BlockEntries(parts, rate=index.pool, width=size)
        self._q_layer = parts.linear({"wq_b": index.num_heads * size}, spec.q_rank)
        self._k_layer = parts.linear({"wk": size}, spec.hidden_size)
        self._norm_weight, self._norm_bias = (parts.tensor(f"k_norm.{kind}", size) for kind in ("weight", "bias"))
        weights = parts.without_adapters.linear({"weights_proj": index.num_heads}, spec.hidden_size, min_bits=16)
        self._weights = weights.weight
        self._bias = parts.tensor("index_kpool_compress_ape", index.pool, size, float32=True)
        name = f"{parts.prefix}index_kpool_compress_gate"
        gate = TensorParam(names=(name,), sizes=(size,), inner=(spec.hidden_size,))
        self._gate = Linear(parts.ops, parts.weights.linear(gate, None))

    def __call__(self, ctx: ForwardContext, x: Tensor, q_latent: Tensor) -> Selection:
        """x [T, H], q_latent [T, Q], normed -> the selected tokens, which are carried to the layers behind this one.
        Writes the keys of the pools that the step's tokens end."""
        ops, index = self._ops, self._index
        q = self._q_layer(ctx, q_latent).view(len(x), index.num_heads, index.head_dim)
        k = ops.norms.layer_norm(self._k_layer(ctx, x), self._norm_weight, self._norm_bias, _NORM_EPS)
        pools, blocks = self._pools.ended(ctx, k, self._gate(ctx, x), self._bias)
        seen = self._pools.keep(ctx, pools.unsqueeze(1), blocks)
        weights = ops.linear.apply_f32(x, self._weights)
        selected = _selected(ops, ctx, index, q, weights, self._pools.cache(ctx), seen)
        ctx.carried.selection = selected
        return selected


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanIndexerSpec:
    """`rope` is of the first entries of queries and keys; `norm_offset` is added to the weights of their norms."""

    name: str
    hidden_size: int
    index: PooledIndex
    rope: RopeSpec
    norm_eps: float
    norm_offset: float
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> MeanIndexer:
        """Return the indexer with its weights."""
        return MeanIndexer(self, parts)


class MeanIndexer:
    """Keeps a key of each pool: the mean of its tokens' keys, normed and then rotated as the pool's first token. All
    heads count alike. For each query it selects as `PooledIndexer`."""

    def __init__(self, spec: MeanIndexerSpec, parts: Parts) -> None:
        parts, index, size = parts.within(spec.name), spec.index, spec.index.head_dim
        self._ops, self._index, self._eps = parts.ops, index, spec.norm_eps
        self._cos_sin, self._axes = parts.rope(spec.rope), parts.rope_axes(spec.rope)
        self._pools = BlockEntries(parts, rate=index.pool, width=size, axes=self._axes)
        self._layer = parts.linear({"index_qk_proj": (index.num_heads + 1) * size}, spec.hidden_size)
        self._q_norm, self._k_norm = (
            parts.tensor(f"{name}_layernorm.weight", size, offset=spec.norm_offset) for name in ("q", "k")
        )
        device = parts.weights.device
        self._weights = torch.ones(1, index.num_heads, dtype=torch.float32, device=device)
        self._bias = torch.zeros(index.pool, size, dtype=torch.float32, device=device)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Selection:
        """x [T, H] -> the selected tokens. Writes the keys of the pools that the step's tokens end."""
        ops, index, none = self._ops, self._index, slice(0)
        q, k = torch.split(self._layer(ctx, x), [index.num_heads * index.head_dim, index.head_dim], dim=-1)
        q = ops.norms.rms_norm(q.view(len(x), index.num_heads, index.head_dim), self._q_norm, self._eps)
        ops.attention.apply_rope(q, q[:, none], ctx.rotated_by(self._axes), self._cos_sin, axes=self._axes)
        means, blocks = self._pools.ended(ctx, k, ops.elementwise.zeros_like(k), self._bias)
        pools = ops.norms.rms_norm(means, self._k_norm, self._eps).unsqueeze(1)
        first = self._pools.first_positions(ctx, blocks)
        ops.attention.apply_rope(pools, pools[:, none], first, self._cos_sin, axes=self._axes)
        seen = self._pools.keep(ctx, pools, blocks)
        return _selected(ops, ctx, index, q, self._weights, self._pools.cache(ctx), seen)


def _selected(
    ops: Ops, ctx: ForwardContext, index: PooledIndex, q: Tensor, weights: Tensor, keys: KvCache, seen: PagedKv
) -> Selection:
    """Return the tokens of the best pools among those `seen`, and those behind the last whole pool."""
    best, counts = ops.selection.select_tokens(q, weights, keys, seen, index.top_k // index.pool)
    positions, counts = ops.selection.block_tokens(best, counts, ctx.positions, ctx.full, index.pool)
    return Selection(positions=positions, counts=counts, paged=ctx.full)

"""The indexer of sparse attention over pools: it scores blocks of tokens by a mean of their keys, and selects the best.

GLM-5.3-Flash; checked against transformers' `glm5_next`. The constant factors of the scores are left out: they change
no order.

Shape letters: T tokens, H hidden size, Q of the queries' latent vector, Hi heads of the indexer, Di their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from forebay.families.mixers import PooledIndex
from forebay.layers.build import Parts
from forebay.layers.compressor import BlockEntries
from forebay.layers.context import ForwardContext
from forebay.layers.linear import Linear
from forebay.layers.params import TensorParam
from forebay.layers.selection import Selection

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
        ops, index, full = self._ops, self._index, ctx.full
        q = self._q_layer(ctx, q_latent).view(len(x), index.num_heads, index.head_dim)
        k = ops.norms.layer_norm(self._k_layer(ctx, x), self._norm_weight, self._norm_bias, _NORM_EPS)
        pools, blocks = self._pools.ended(ctx, k, self._gate(ctx, x), self._bias)
        seen = self._pools.keep(ctx, pools.unsqueeze(1), blocks)
        weights = ops.linear.apply_f32(x, self._weights)
        best, counts = ops.selection.select_tokens(q, weights, self._pools.cache(ctx), seen, index.top_k // index.pool)
        positions, counts = ops.selection.block_tokens(best, counts, ctx.positions, full, index.pool)
        selected = Selection(positions=positions, counts=counts, paged=full)
        ctx.carried.selection = selected
        return selected

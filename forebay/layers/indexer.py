"""The indexer of sparse attention: it scores all tokens that a query sees, and selects the best.

DeepSeek-V3.2-Exp, section 2.1 ("lightning indexer"); checked against transformers' `deepseek_v32` and `glm_moe_dsa`.
The constant factors of the scores are left out: they change no order.

Shape letters: T tokens, H hidden size, Q of the queries' latent vector, Hi heads of the indexer, Di their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from forebay.families.base.mixers import Index
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.params import Rows, in_order
from forebay.layers.rotary import RopeSpec
from forebay.layers.selection import Selection
from forebay.memory.kv_allocator import KV
from forebay.pools.cache_spec import IndexKeys

_NORM_EPS: Final = 1e-6  # of the keys' norm, whatever the rest of a model has


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """`q_rank` is Q; `rope` is of the first entries of queries and keys."""

    name: str
    hidden_size: int
    q_rank: int
    index: Index
    rope: RopeSpec
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> Indexer:
        """Return the indexer with its weights."""
        return Indexer(self, parts)


class Indexer:
    """Keeps a key of each token, and selects `top_k` tokens for each query."""

    def __init__(self, spec: IndexerSpec, parts: Parts) -> None:
        parts, index = parts.within(spec.name), spec.index
        self._ops, self._index = parts.ops, index
        self._layer = parts.keep(IndexKeys(head_dim=index.head_dim))
        self._cos_sin = parts.rope(spec.rope)
        rows, size = _rotary_rows(spec), index.head_dim
        of_heads = tuple(
            range(head * size + part.start, head * size + part.stop, part.step)
            for head in range(index.num_heads)
            for part in rows
        )
        self._q_layer = parts.linear({"wq_b": index.num_heads * size}, spec.q_rank, rows=of_heads)
        self._k_layer = parts.linear({"wk": size}, spec.hidden_size, rows=rows)
        self._norm_weight, self._norm_bias = (
            parts.tensor(f"k_norm.{kind}", size, change=lambda tensor: in_order(tensor, rows))
            for kind in ("weight", "bias")
        )
        weights = parts.without_adapters.linear({"weights_proj": index.num_heads}, spec.hidden_size, min_bits=16)
        self._weights = weights.weight

    def __call__(self, ctx: ForwardContext, x: Tensor, q_latent: Tensor) -> Selection:
        """x [T, H], q_latent [T, Q], normed -> the selected tokens, which are carried to the layers behind this one.
        Writes the keys of the step's tokens."""
        ops, index, paged, keys = self._ops, self._index, ctx.pages(KV), ctx.cache.kv(self._layer)
        q = self._q_layer(ctx, q_latent).view(len(x), index.num_heads, index.head_dim)
        k = ops.norms.layer_norm(self._k_layer(ctx, x), self._norm_weight, self._norm_bias, _NORM_EPS).unsqueeze(1)
        ops.attention.rope_and_store_kv(q, k, k, ctx.positions, self._cos_sin, keys, paged.out_cache_loc)
        weights = ops.linear.apply_f32(x, self._weights)
        positions, counts = ops.selection.select_tokens(q, weights, keys, paged, index.top_k)
        selected = Selection(positions=positions, counts=counts, paged=paged)
        ctx.carried.selection = selected
        return selected


def _rotary_rows(spec: IndexerSpec) -> Rows:
    """Halves are paired here: the first of each pair, then the second ones, then the rows that are not rotated. No rows
    if the checkpoint has them in this order."""
    if not spec.index.interleaved:
        return ()
    rotated, unrotated = spec.rope.dim, range(spec.rope.dim, spec.index.head_dim)
    pairs = range(0, rotated, 2), range(1, rotated, 2)
    return (*pairs, unrotated) if unrotated else pairs

"""Attention with queries alone, over keys and values that another layer keeps (Gemma 4).

Shape letters: T tokens, H hidden size, Hq query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.paged_attention import PagedAttention
from forebay.layers.params import rows_of_heads
from forebay.layers.rotary import RopeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryAttentionSpec:
    """`name` is the checkpoint's prefix; `kept_by` the number, among what the model keeps in the `CachePool`, of the
    layer that keeps the KV, as of the same window. Queries are normed, each head by itself. `bidirectional`: see
    `PagedAttention`."""

    name: str
    kept_by: int
    hidden_size: int
    num_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    sliding_window: int
    scale: float
    bias: bool = False
    bidirectional: bool = False
    for_ranks: ClassVar[bool] = True

    def build(self, parts: Parts) -> QueryAttention:
        return QueryAttention(self, parts)


class QueryAttention:
    """Attention of one layer that has no keys and values of its own."""

    def __init__(self, spec: QueryAttentionSpec, parts: Parts) -> None:
        parts, size = parts.within(spec.name), spec.num_heads * spec.head_dim
        self._spec, self._ops, self._exchange = spec, parts.ops, parts.share.exchange
        heads = parts.share.of(spec.num_heads, "query heads")
        own = parts.share.part(*rows_of_heads((spec.num_heads, heads, spec.head_dim)))
        self._num_heads = len(heads)
        self._queries = parts.linear({"q_proj": size}, spec.hidden_size, bias=spec.bias, own=own)
        self._norm = parts.tensor("q_norm.weight", spec.head_dim)
        self._output = parts.gathered("o_proj", spec.hidden_size, size, bias=spec.bias)
        kept_by = parts.first + spec.kept_by
        self._attend = PagedAttention(
            parts,
            kept_by,
            scale=spec.scale,
            rope=spec.rope,
            window=spec.sliding_window,
            bidirectional=spec.bidirectional,
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        q = self._queries(ctx, x).view(len(x), self._num_heads, self._spec.head_dim)
        q = self._ops.norms.rms_norm(q, self._norm, self._spec.norm_eps)
        return self._output(ctx, self._exchange.gather(self._attend.read(ctx, q).flatten(1)))

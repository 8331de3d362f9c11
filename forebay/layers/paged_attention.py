"""The way from layers to their KV: what kind of attention there is between projections, all of it goes through here.

Shape letters: T tokens, Hq query heads, Hk KV heads, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.rotary import RopeSpec
from forebay.pools.cache_spec import CacheSpec


class PagedAttention:
    """Keeps a layer's keys and values, and attends over all that the rows have of them.

    `rope`: q and k are rotated first. `window` is the size of a sliding window, 0 for none. `sinks` [Hq] as in
    `AttentionOps.paged_attention`.
    """

    def __init__(
        self,
        parts: Parts,
        keeps: CacheSpec,
        *,
        scale: float,
        rope: RopeSpec | None = None,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        self._ops = parts.ops
        self._layer = parts.keep(keeps)
        self._cos_sin = None if rope is None else parts.rope(rope)
        self._scale, self._window, self._sinks = scale, window, sinks

    def __call__(self, ctx: ForwardContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv]. q and k may change."""
        ops, paged = self._ops, ctx.window if self._window else ctx.full
        cache = ctx.cache.kv(self._layer)
        if self._cos_sin is None:
            ops.store_kv(k, v, cache, paged.out_cache_loc)
        else:
            ops.rope_and_store_kv(q, k, v, ctx.positions, self._cos_sin, cache, paged.out_cache_loc)
        return ops.paged_attention(q, cache, paged, scale=self._scale, sliding_window=self._window, sinks=self._sinks)

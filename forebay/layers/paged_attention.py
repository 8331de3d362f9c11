"""The way from layers to their KV: what kind of attention there is between projections, all of it goes through here.

Shape letters: T tokens, Hq query heads, Hk KV heads, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from torch import Tensor

from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.rotary import QueryScaleSpec, RopeSpec
from forebay.layers.selection import Selection
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.tiers import TieredKv


class PagedAttention:
    """Stores keys and values as those of `layer`, a number in the `CachePool`, and attends over all that rows have, in
    the pages of that layer's kind of cache.

    `rope`: q and k are rotated first. `query_scale`: q is then multiplied by it. `window` is the size of a sliding
    window, 0 for none. `sinks` [Hq] and `softcap` as in `AttentionOps.paged_attention`. `bidirectional`: a token in a
    picture sees all of it.
    """

    def __init__(
        self,
        parts: Parts,
        layer: int,
        *,
        scale: float,
        rope: RopeSpec | None = None,
        query_scale: QueryScaleSpec | None = None,
        window: int = 0,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        self._ops = parts.ops
        self._layer = layer
        self._cos_sin = None if rope is None else parts.rope(rope)
        self._axes = None if rope is None else parts.rope_axes(rope)
        self._query_scales = None if query_scale is None else parts.ropes.table(query_scale)
        self._scale, self._window, self._sinks, self._softcap = scale, window, sinks, softcap
        self._bidirectional = bidirectional

    def __call__(
        self, ctx: ForwardContext, q: Tensor, k: Tensor, v: Tensor, *, selected: Selection | None = None
    ) -> Tensor:
        """q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv]. q and k may change. `selected`: the tokens that are
        read, None for all."""
        tiers = None if ctx.cache.tiers is None else ctx.cache.tiers.of(self._layer)
        if tiers is not None:
            assert selected is not None, "tiers are of layers that read selected tokens"
            return self._over_tiers(ctx, q, k, v, selected, tiers)
        ops, loc, cache = self._ops, self._pages(ctx).out_cache_loc, ctx.cache.kv(self._layer)
        if self._cos_sin is None:
            ops.attention.store_kv(k, v, cache, loc)
        else:
            ops.attention.rope_and_store_kv(
                q, k, v, ctx.rotated_by(self._axes), self._cos_sin, cache, loc, axes=self._axes
            )
        return self._over_kept(ctx, q, None if selected is None else selected.pages(ops))

    def _over_tiers(
        self, ctx: ForwardContext, q: Tensor, k: Tensor, v: Tensor, selected: Selection, tiers: TieredKv
    ) -> Tensor:
        """Keep the step's tokens in both tiers, then attend over the selected ones, wherever each is."""
        ops, step = self._ops, ctx.kinds[RESIDENT]
        for loc in (step.device_loc, step.host_loc):
            ops.attention.store_kv(k, v, tiers.kv, loc)
        pages = ops.tiers.swap_in(selected.positions, selected.counts, selected.paged, tiers, step)
        return ops.attention.paged_attention(
            q, tiers.kv, pages, scale=self._scale, sinks=self._sinks, softcap=self._softcap
        )

    def read(self, ctx: ForwardContext, q: Tensor) -> Tensor:
        """Keep nothing: q [T, Hq, D], which may change, over the KV that is there already -> [T, Hq, Dv]."""
        if self._cos_sin is not None:
            self._ops.attention.apply_rope(q, q[:, :0], ctx.rotated_by(self._axes), self._cos_sin, axes=self._axes)
        return self._over_kept(ctx, q)

    def _over_kept(self, ctx: ForwardContext, q: Tensor, selected: PagedKv | None = None) -> Tensor:
        if self._query_scales is not None:
            self._ops.elementwise.scale_rows_(
                q.view(len(q), q.shape[1] * q.shape[2]), self._query_scales, ctx.positions
            )
        cache, pages = ctx.cache.kv(self._layer), self._pages(ctx) if selected is None else selected
        return self._ops.attention.paged_attention(
            q,
            cache,
            pages,
            scale=self._scale,
            sliding_window=self._window,
            sinks=self._sinks,
            softcap=self._softcap,
            ahead=ctx.pictures.ahead if self._bidirectional and ctx.pictures is not None else None,
        )

    def _pages(self, ctx: ForwardContext) -> PagedKv:
        return ctx.pages(ctx.cache.specs[self._layer].kind)

"""The native twins of the ops in attention.py: thin calls into the compiled kernels."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from forebay.ops.native.kernels import Kernels, address, view
from forebay.ops.reference.attention import AttentionOps, KvCache, PagedKv

_Rope = tuple[int | None, int, int | None, int, int | None]
"""The kernels' parameters: positions and the entries from one axis to the next, the table and its width, axes."""

_NO_ROPE: Final = (None, 0, None, 0, None)


class NativeAttention(AttentionOps):
    """See `AttentionOps`. The last dimension of every tensor is contiguous, and so are a token's heads."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._apply_rope = kernels.by_dtype("fb_apply_rope_{}")
        self._rope_and_store_kv = kernels.by_cache_dtype("fb_rope_and_store_kv_{}_{}")
        self._make_plan = kernels.bind("fb_attention_plan_make")
        self._paged_attention = kernels.by_cache_dtype("fb_paged_attention_{}_{}")

    def apply_rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, axes: Tensor | None = None
    ) -> None:
        tokens, q_heads, head_dim = q.shape
        heads = (*view(q), q_heads, *view(k), k.shape[1], head_dim)
        self._apply_rope[q.dtype](self._pool, *heads, *_rope(positions, cos_sin, axes), tokens)

    def store_kv(self, k: Tensor, v: Tensor, cache: KvCache, loc: Tensor) -> None:
        self._store((None, 0, 0), k, v, _NO_ROPE, cache, loc)

    def rope_and_store_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: KvCache,
        loc: Tensor,
        *,
        axes: Tensor | None = None,
    ) -> None:
        rope = _rope(positions, cos_sin, axes)
        self._store((q.data_ptr(), q.stride(0), q.shape[1]), k, v, rope, cache, loc)

    def _store(
        self,
        q: tuple[int | None, int, int],
        k: Tensor,
        v: Tensor,
        rope: _Rope,
        cache: KvCache,
        loc: Tensor,
    ) -> None:
        tokens, heads, head_dim = k.shape
        within_keys = cache.v.data_ptr() == cache.k.data_ptr()
        self._rope_and_store_kv[k.dtype, cache.k.dtype](
            self._pool,
            *q,
            k.data_ptr(),
            k.stride(0),
            heads,
            v.data_ptr(),
            v.stride(0),
            0 if within_keys else heads,
            head_dim,
            v.shape[2],
            *rope,
            cache.k.data_ptr(),
            cache.k.stride(0),
            address(cache.k_scale),
            cache.v.data_ptr(),
            cache.v.stride(0),
            address(cache.v_scale),
            loc.data_ptr(),
            tokens,
        )

    def paged_attention(
        self,
        q: Tensor,
        cache: KvCache,
        paged: PagedKv,
        *,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        ahead: Tensor | None = None,
    ) -> Tensor:
        tokens, q_heads, head_dim = q.shape
        _, kv_heads, v_dim = cache.v.shape
        plan = self._plan(paged, (q_heads, kv_heads, head_dim, v_dim, sliding_window), ahead)
        k_stride, k_head, _ = cache.k.stride()
        v_stride, v_head, _ = cache.v.stride()
        out = q.new_empty(tokens, q_heads, v_dim)
        self._paged_attention[q.dtype, cache.k.dtype](
            self._pool,
            plan.address,
            q.data_ptr(),
            q.stride(0),
            cache.k.data_ptr(),
            k_stride,
            k_head,
            address(cache.k_scale),
            cache.v.data_ptr(),
            v_stride,
            v_head,
            address(cache.v_scale),
            scale,
            softcap,
            address(sinks),
            out.data_ptr(),
        )
        return out

    def _plan(self, paged: PagedKv, heads: tuple[int, ...], ahead: Tensor | None) -> _Plan:
        """The plan, made once for all layers of a step with such heads. `heads`: query and KV heads, both sizes, the
        window. A step has at most one `ahead`."""
        key = (*heads, ahead is not None)
        plan = paged.plans.get(key)
        if plan is not None:
            assert isinstance(plan, _Plan)
            return plan
        plan = paged.plans[key] = _Plan(self._kernels)
        pages = (*view(paged.page_table), address(paged.page_map))
        seqs = paged.rows.data_ptr(), paged.q_start.data_ptr(), paged.seq_lens.data_ptr(), paged.rows.shape[0]
        self._make_plan(
            self._pool,
            plan.address,
            *pages,
            *seqs,
            paged.page_size,
            *heads,
            not paged.one_each,
            paged.causal,
            address(ahead),
        )
        return plan


class _Plan:
    """Which thread reads which keys (cpu/attention_plan.h)."""

    def __init__(self, kernels: Kernels) -> None:
        self.address = kernels.create("fb_attention_plan", self)


def _rope(positions: Tensor, cos_sin: Tensor, axes: Tensor | None) -> _Rope:
    apart = 0 if axes is None else positions.stride(0)
    return positions.data_ptr(), apart, cos_sin.data_ptr(), cos_sin.shape[1], address(axes)

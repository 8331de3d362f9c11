"""The native twins of the ops in attention.py: thin calls into the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from forebay.ops.kernels import Kernels


class NativeAttention:
    """See `AttentionOps`. The last dimension of every tensor is contiguous, and so are a token's heads."""

    def __init__(self, kernels: Kernels) -> None:
        self._pool = kernels.pool
        self._apply_rope = kernels.by_dtype("fb_apply_rope_{}")
        self._rope_and_store_kv = kernels.by_cache_dtype("fb_rope_and_store_kv_{}_{}")
        self._paged_attention = kernels.by_cache_dtype("fb_paged_attention_{}_{}")

    def apply_rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        tokens, q_heads, head_dim = q.shape
        self._apply_rope[q.dtype](
            self._pool,
            q.data_ptr(),
            q.stride(0),
            q_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            head_dim,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            cos_sin.shape[1],
            tokens,
        )

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        no_rope = (None, None, 0)
        self._store(None, k, v, no_rope, k_cache, v_cache, loc, k_scale, v_scale)

    def rope_and_store_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        rope = (positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1])
        self._store(q, k, v, rope, k_cache, v_cache, loc, k_scale, v_scale)

    def _store(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        rope: tuple[int | None, int | None, int],
        k_cache: Tensor,
        v_cache: Tensor,
        loc: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        tokens, heads, head_dim = k.shape
        within_keys = v_cache.data_ptr() == k_cache.data_ptr()
        self._rope_and_store_kv[k.dtype, k_cache.dtype](
            self._pool,
            *((None, 0, 0) if q is None else (q.data_ptr(), q.stride(0), q.shape[1])),
            k.data_ptr(),
            k.stride(0),
            heads,
            v.data_ptr(),
            v.stride(0),
            0 if within_keys else heads,
            head_dim,
            v.shape[2],
            *rope,
            k_cache.data_ptr(),
            k_cache.stride(0),
            None if k_scale is None else k_scale.data_ptr(),
            v_cache.data_ptr(),
            v_cache.stride(0),
            None if v_scale is None else v_scale.data_ptr(),
            loc.data_ptr(),
            tokens,
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        rows: Tensor,
        q_start: Tensor,
        seq_lens: Tensor,
        page_size: int,
        scale: float,
        sliding_window: int = 0,
        sinks: Tensor | None = None,
        page_map: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        tokens, q_heads, head_dim = q.shape
        v_dim = v_cache.shape[2]
        k_slot, k_head, _ = k_cache.stride()
        v_slot, v_head, _ = v_cache.stride()
        out = q.new_empty(tokens, q_heads, v_dim)
        self._paged_attention[q.dtype, k_cache.dtype](
            self._pool,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            k_slot,
            k_head,
            None if k_scale is None else k_scale.data_ptr(),
            v_cache.data_ptr(),
            v_slot,
            v_head,
            None if v_scale is None else v_scale.data_ptr(),
            page_table.data_ptr(),
            page_table.stride(0),
            None if page_map is None else page_map.data_ptr(),
            rows.data_ptr(),
            q_start.data_ptr(),
            seq_lens.data_ptr(),
            rows.shape[0],
            page_size,
            q_heads,
            k_cache.shape[1],
            head_dim,
            v_dim,
            scale,
            sliding_window,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out

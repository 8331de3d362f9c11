"""The native twins of the ops in tiers.py: thin calls into the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from forebay.ops.native.kernels import Kernels, view
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.selection import token_sequences
from forebay.ops.reference.tiers import TieredKv, TierLayout, TierOps, TierStep


class NativeTiers(TierOps):
    """See `TierOps`. All tensors are contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._bind_newest = kernels.bind("fb_bind_newest")
        self._swap_in = kernels.bind("fb_swap_in")

    def bind_newest(
        self,
        out_cache_loc: Tensor,
        positions: Tensor,
        rows: Tensor,
        q_start: Tensor,
        page_map: Tensor,
        active: Tensor,
        newest: Tensor,
        layout: TierLayout,
    ) -> tuple[Tensor, Tensor]:
        device_loc, host_loc = (out_cache_loc.new_empty(len(out_cache_loc)) for _ in range(2))
        tokens = out_cache_loc.data_ptr(), positions.data_ptr()
        seqs = rows.data_ptr(), q_start.data_ptr(), len(rows)
        state = page_map.data_ptr(), active.data_ptr(), newest.data_ptr()
        self._bind_newest(self._pool, *tokens, *seqs, *state, *layout, device_loc.data_ptr(), host_loc.data_ptr())
        return device_loc, host_loc

    def swap_in(self, positions: Tensor, counts: Tensor, paged: PagedKv, tiers: TieredKv, step: TierStep) -> PagedKv:
        tokens, most = positions.shape
        locations, rows, starts = (positions.new_empty(size) for size in ((tokens, most), (tokens,), (tokens + 1,)))
        seqs = paged.rows.data_ptr(), paged.q_start.data_ptr(), paged.seq_lens.data_ptr(), len(paged.rows)
        self._swap_in(
            self._pool,
            positions.data_ptr(),
            counts.data_ptr(),
            most,
            *view(paged.page_table),
            *seqs,
            step.page_map.data_ptr(),
            step.active.data_ptr(),
            step.newest.data_ptr(),
            tiers.positions.data_ptr(),
            tiers.last_used.data_ptr(),
            *step.layout,
            *_bytes(tiers),
            locations.data_ptr(),
            rows.data_ptr(),
            starts.data_ptr(),
            step.counts.data_ptr(),
        )
        return token_sequences(locations, rows, starts, counts, paged)


def _bytes(tiers: TieredKv) -> tuple[int | None, ...]:
    """Return the address of each column of the layer and the bytes of a token there; values within keys have none."""
    k, v, k_scale, v_scale = tiers.kv
    own = (k, k_scale, None, None) if v.data_ptr() == k.data_ptr() else (k, k_scale, v, v_scale)
    return tuple(
        part
        for tensor in own
        for part in ((None, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.itemsize))
    )

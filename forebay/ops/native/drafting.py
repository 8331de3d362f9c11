"""The native twins of the ops in drafting.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels
from forebay.ops.reference.accept import Known
from forebay.ops.reference.drafting import DraftingOps


class NativeDrafting(DraftingOps):
    """See `DraftingOps`. All tensors are contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._gather_rows = kernels.bind("fb_gather_rows")
        self._scatter_rows = kernels.bind("fb_scatter_rows")
        self._clear_rows = kernels.bind("fb_clear_rows")
        self._follow = kernels.bind("fb_follow")
        self._keep_drafts = kernels.bind("fb_keep_drafts")

    def gather_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        out = table.new_empty(rows.shape[0], table.shape[1])
        row_bytes = table.shape[1] * table.itemsize
        self._gather_rows(self._pool, table.data_ptr(), rows.data_ptr(), out.data_ptr(), row_bytes, rows.shape[0])
        return out

    def scatter_rows(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        row_bytes = table.shape[1] * table.itemsize
        self._scatter_rows(self._pool, table.data_ptr(), rows.data_ptr(), values.data_ptr(), row_bytes, rows.shape[0])

    def clear_rows(self, table: Tensor, rows: Tensor, keep: Tensor) -> None:
        row_bytes = table.stride(0) * table.itemsize
        self._clear_rows(self._pool, table.data_ptr(), rows.data_ptr(), keep.data_ptr(), row_bytes, rows.shape[0])

    def follow(
        self,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        q_start: Tensor,
        known: Known,
        vocab: int,
    ) -> tuple[Tensor, Tensor]:
        next_ids, ends = torch.empty_like(input_ids), torch.empty_like(rows)
        of_step = input_ids.data_ptr(), positions.data_ptr(), rows.data_ptr(), q_start.data_ptr()
        of_rows = known.last_tokens.data_ptr(), known.kv_lens.data_ptr(), vocab
        self._follow(self._pool, *of_step, *of_rows, next_ids.data_ptr(), ends.data_ptr(), rows.shape[0], len(next_ids))
        return next_ids, ends

    def keep_drafts(self, ids: Tensor, rows: Tensor, counts: Tensor, column: int, draft_tokens: Tensor) -> Tensor:
        more = torch.empty_like(rows)
        columns = ids.data_ptr(), rows.data_ptr(), counts.data_ptr()
        to = draft_tokens.data_ptr(), draft_tokens.shape[1], more.data_ptr()
        self._keep_drafts(self._pool, *columns, column, *to, rows.shape[0])
        return more

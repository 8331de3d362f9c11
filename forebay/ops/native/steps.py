"""The native twins of the ops in steps.py and accept.py: thin calls into the compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels, address
from forebay.ops.reference.accept import Known
from forebay.ops.reference.steps import Pages, Placement, StepOps


class NativeSteps(StepOps):
    """See `StepOps`. All tensors are contiguous."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._pool = kernels, kernels.pool
        self._gather = kernels.bind("fb_gather")
        self._scatter = kernels.bind("fb_scatter")
        self._of_tokens = kernels.bind("fb_of_tokens")
        self._rope_positions = kernels.bind("fb_rope_positions")
        self._place_tokens = kernels.bind("fb_place_tokens")
        self._map_locations = kernels.bind("fb_map_locations")
        self._due = kernels.bind("fb_due")
        self._accepted_stops = kernels.bind("fb_accepted_stops")
        self._advance = kernels.bind("fb_advance")
        self._decode_ids = kernels.bind("fb_decode_ids")
        self._accept = kernels.bind("fb_accept")

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        out = torch.empty(rows.shape[0], dtype=torch.int64)
        self._gather(self._pool, table.data_ptr(), rows.data_ptr(), out.data_ptr(), rows.shape[0])
        return out

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        self._scatter(self._pool, table.data_ptr(), rows.data_ptr(), values.data_ptr(), rows.shape[0])

    def of_tokens(self, table: Tensor, rows: Tensor, q_start: Tensor, num_tokens: int) -> Tensor:
        out = torch.empty(num_tokens, dtype=torch.int32)
        given = table.data_ptr(), rows.data_ptr(), q_start.data_ptr()
        self._of_tokens(self._pool, *given, out.data_ptr(), rows.shape[0])
        return out

    def rope_positions(
        self, positions: Tensor, given: Tensor | None, rows: Tensor, q_start: Tensor, deltas: Tensor
    ) -> Tensor:
        num_tokens = positions.shape[0]
        out = torch.empty(3, num_tokens, dtype=torch.int64)
        inputs = positions.data_ptr(), address(given), rows.data_ptr(), q_start.data_ptr(), deltas.data_ptr()
        self._rope_positions(self._pool, *inputs, out.data_ptr(), rows.shape[0], num_tokens)
        return out

    def place_tokens(self, rows: Tensor, q_start: Tensor, kv_lens: Tensor, pages: Pages, num_tokens: int) -> Placement:
        table, page_size = pages
        num_seqs = rows.shape[0]
        positions, locs = (torch.empty(num_tokens, dtype=torch.int64) for _ in range(2))
        seq_lens = torch.empty(num_seqs, dtype=torch.int32)
        self._place_tokens(
            self._pool,
            rows.data_ptr(),
            q_start.data_ptr(),
            kv_lens.data_ptr(),
            table.data_ptr(),
            table.shape[1],
            page_size,
            positions.data_ptr(),
            seq_lens.data_ptr(),
            locs.data_ptr(),
            num_seqs,
        )
        return Placement(positions, seq_lens, locs)

    def map_locations(self, loc: Tensor, page_map: Tensor, page_size: int) -> Tensor:
        out = torch.empty(loc.shape[0], dtype=torch.int64)
        self._map_locations(self._pool, loc.data_ptr(), page_map.data_ptr(), page_size, out.data_ptr(), loc.shape[0])
        return out

    def due(self, slots: Tensor, ends: Tensor, lens: Tensor, positions: Tensor) -> Tensor:
        out = torch.empty(slots.shape[0], dtype=torch.int32)
        columns = slots.data_ptr(), ends.data_ptr(), lens.data_ptr(), positions.data_ptr()
        self._due(self._pool, *columns, out.data_ptr(), slots.shape[0])
        return out

    def accepted_stops(
        self,
        q_start: Tensor,
        num_new: Tensor,
        positions: Tensor,
        written: Tensor,
        snapshot_lens: Tensor,
        snapshot_slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_seqs = num_new.shape[0]
        stops, ends, slots = (torch.empty(num_seqs, dtype=torch.int32) for _ in range(3))
        inputs = (t.data_ptr() for t in (q_start, num_new, positions, written, snapshot_lens, snapshot_slots))
        self._accepted_stops(self._pool, *inputs, stops.data_ptr(), ends.data_ptr(), slots.data_ptr(), num_seqs)
        return stops, ends, slots

    def advance(self, kv_lens: Tensor, rows: Tensor, q_start: Tensor) -> None:
        self._advance(self._pool, kv_lens.data_ptr(), rows.data_ptr(), q_start.data_ptr(), rows.shape[0])

    def decode_ids(self, rows: Tensor, q_start: Tensor, known: Known, num_tokens: int, vocab: int) -> Tensor:
        ids = torch.empty(num_tokens, dtype=torch.int64)
        _, last, drafts = known
        tables = last.data_ptr(), drafts.data_ptr(), drafts.shape[1]
        seqs = rows.data_ptr(), q_start.data_ptr()
        self._decode_ids(self._pool, *seqs, *tables, vocab, ids.data_ptr(), rows.shape[0])
        return ids

    def accept(
        self, token_ids: Tensor, finite: Tensor, positions: Tensor, rows: Tensor, q_start: Tensor, known: Known
    ) -> Tensor:
        num_new = torch.empty(rows.shape[0], dtype=torch.int64)
        chosen = token_ids.data_ptr(), finite.data_ptr(), positions.data_ptr()
        lens, last, drafts = known
        seqs = rows.data_ptr(), q_start.data_ptr(), drafts.data_ptr(), drafts.shape[1]
        tables = last.data_ptr(), lens.data_ptr()
        self._accept(self._pool, *chosen, *seqs, *tables, num_new.data_ptr(), rows.shape[0])
        return num_new

"""Kernels around the model: one program per sequence, or per block of entries."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.accept import Known
from forebay.ops.reference.steps import Pages, Placement, StepOps
from forebay.ops.triton.launch import kernel

_BLOCK: Final = 128  # tokens of a sequence, or snapshots, at a time


@kernel
@triton.jit
def _place_tokens(
    rows,
    q_start,
    kv_lens,
    page_table,
    pages_per_row,
    page_size,
    positions,
    seq_lens,
    locs,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    first = tl.load(q_start + seq)
    count = tl.load(q_start + seq + 1) - first
    end = tl.zeros([], tl.int64) + pages_per_row * page_size
    start = tl.minimum(tl.maximum(tl.load(kv_lens + row), 0), end)
    start = tl.where(row == 0, 0, start)
    tl.store(seq_lens + seq, tl.minimum(start + count, end).to(tl.int32))
    for done in range(0, count, BLOCK):
        j = done + tl.arange(0, BLOCK)
        live = j < count
        position = tl.where(row == 0, 0, start + j)
        known = live & (row > 0) & (position < end)
        page = tl.load(page_table + row * pages_per_row + position // page_size, mask=known, other=0).to(tl.int64)
        inside = position % page_size
        tl.store(positions + first + j, tl.minimum(position, end - 1), mask=live)
        tl.store(locs + first + j, page * page_size + inside, mask=live)


@kernel
@triton.jit
def _rope_positions(
    positions, given, rows, q_start, deltas, out, num_tokens, HAS_GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    seq = tl.program_id(0)
    first = tl.load(q_start + seq)
    count = tl.load(q_start + seq + 1) - first
    delta = tl.load(deltas + tl.load(rows + seq))
    for done in range(0, count, BLOCK):
        j = done + tl.arange(0, BLOCK)
        live, token = j < count, (first + j).to(tl.int64)
        position = tl.maximum(tl.load(positions + token, mask=live, other=0) + delta, 0)
        for axis in tl.static_range(3):
            own = position
            if HAS_GIVEN:
                found = tl.load(given + 3 * token + axis, mask=live, other=-1)
                own = tl.where(found < 0, position, found)
            tl.store(out + axis * num_tokens + token, own, mask=live)


@kernel
@triton.jit
def _map_locations(loc, page_map, page_size, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    location = tl.load(loc + at, mask=live, other=0)
    page = location // page_size
    mapped = tl.load(page_map + page, mask=live & (page > 0), other=0).to(tl.int64)
    tl.store(out + at, mapped * page_size + location % page_size, mask=live)


@kernel
@triton.jit
def _due(slots, ends, lens, positions, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    end = tl.load(ends + at, mask=live, other=0)
    reached = tl.load(positions + end - 1, mask=end > 0, other=-1) + 1
    due = (end > 0) & (reached == tl.load(lens + at, mask=live, other=0))
    tl.store(out + at, tl.load(slots + at, mask=live & due, other=0), mask=live)


@kernel
@triton.jit
def _advance(kv_lens, rows, q_start):
    seq = tl.program_id(0)
    tl.atomic_add(kv_lens + tl.load(rows + seq), (tl.load(q_start + seq + 1) - tl.load(q_start + seq)).to(tl.int64))


@kernel
@triton.jit
def _decode_ids(rows, q_start, last_tokens, draft_tokens, width, vocab, ids, BLOCK: tl.constexpr):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    first = tl.load(q_start + seq)
    count = tl.load(q_start + seq + 1) - first
    last = tl.load(last_tokens + row)
    for done in range(0, count, BLOCK):
        j = done + tl.arange(0, BLOCK)
        drafted = (j > 0) & (j <= width) & (j < count)
        draft = tl.load(draft_tokens + row * width + j - 1, mask=drafted, other=-1)
        token = tl.where(j == 0, last, draft)
        tl.store(ids + first + j, tl.where((token >= 0) & (token < vocab), token, 0), mask=j < count)


@kernel
@triton.jit
def _accept(
    token_ids, finite, positions, rows, q_start, draft_tokens, width, last_tokens, kv_lens, num_new, BLOCK: tl.constexpr
):
    """A sequence has at most `width` drafts: one block."""
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    first = tl.load(q_start + seq)
    count = tl.load(q_start + seq + 1) - first
    j = tl.arange(0, BLOCK)
    drafted = (j < count - 1) & (j < width)
    chosen = tl.load(token_ids + first + j, mask=drafted, other=-1)
    known = tl.load(finite + first + j, mask=drafted, other=0) != 0
    right = drafted & known & (chosen == tl.load(draft_tokens + row * width + j, mask=drafted, other=-2))
    num_accepted = tl.min(tl.where(right, BLOCK, j), 0)
    last = first + num_accepted
    tl.store(num_new + seq, tl.where(count > 0, num_accepted + 1, 0).to(tl.int64))
    tl.store(last_tokens + row, tl.load(token_ids + last, mask=count > 0, other=0), mask=count > 0)
    tl.store(kv_lens + row, tl.load(positions + last, mask=count > 0, other=0) + 1, mask=count > 0)


smallest_kernel: Final = _advance  # of which a start finds out whether Triton compiles anything


class TritonSteps(StepOps):
    """See `StepOps`."""

    def place_tokens(self, rows: Tensor, q_start: Tensor, kv_lens: Tensor, pages: Pages, num_tokens: int) -> Placement:
        num_seqs = len(rows)
        positions, locs = (torch.empty(num_tokens, dtype=torch.int64, device=rows.device) for _ in range(2))
        seq_lens = torch.empty(num_seqs, dtype=torch.int32, device=rows.device)
        if num_seqs:
            _place_tokens[(num_seqs,)](
                rows,
                q_start,
                kv_lens,
                pages.table,
                pages.table.shape[1],
                pages.page_size,
                positions,
                seq_lens,
                locs,
                BLOCK=_BLOCK,
            )
        return Placement(positions, seq_lens, locs)

    def rope_positions(
        self, positions: Tensor, given: Tensor | None, rows: Tensor, q_start: Tensor, deltas: Tensor
    ) -> Tensor:
        out = torch.empty(3, len(positions), dtype=torch.int64, device=positions.device)
        if len(rows):
            own = positions if given is None else given
            tables, has_given = (rows, q_start, deltas), given is not None
            args = positions, own, *tables, out, len(positions)
            _rope_positions[(len(rows),)](*args, HAS_GIVEN=has_given, BLOCK=_BLOCK)
        return out

    def map_locations(self, loc: Tensor, page_map: Tensor, page_size: int) -> Tensor:
        out, count = torch.empty_like(loc), len(loc)
        if count:
            _map_locations[(triton.cdiv(count, _BLOCK),)](loc, page_map, page_size, out, count, BLOCK=_BLOCK)
        return out

    def due(self, slots: Tensor, ends: Tensor, lens: Tensor, positions: Tensor) -> Tensor:
        out, count = torch.empty_like(slots), len(slots)
        if count:
            _due[(triton.cdiv(count, _BLOCK),)](slots, ends, lens, positions, out, count, BLOCK=_BLOCK)
        return out

    def advance(self, kv_lens: Tensor, rows: Tensor, q_start: Tensor) -> None:
        if len(rows):
            _advance[(len(rows),)](kv_lens, rows, q_start)

    def decode_ids(self, rows: Tensor, q_start: Tensor, known: Known, num_tokens: int, vocab: int) -> Tensor:
        _, last, drafts = known
        ids, width = torch.empty(num_tokens, dtype=torch.int64, device=rows.device), drafts.shape[1]
        if len(rows):
            _decode_ids[(len(rows),)](rows, q_start, last, drafts, width, vocab, ids, BLOCK=_BLOCK)
        return ids

    def accept(
        self, token_ids: Tensor, finite: Tensor, positions: Tensor, rows: Tensor, q_start: Tensor, known: Known
    ) -> Tensor:
        lens, last, drafts = known
        num_new, width = torch.empty(len(rows), dtype=torch.int64, device=rows.device), drafts.shape[1]
        if len(rows):
            chosen = token_ids, finite, positions
            tables = drafts, width, last, lens
            _accept[(len(rows),)](*chosen, rows, q_start, *tables, num_new, BLOCK=triton.next_power_of_2(width + 1))
        return num_new

"""Reading selected tokens from two tiers of KV (HiSparse): a program places what a row reads, others copy.

The host tier is memory of the host at the addresses of a layer's later locations (`pools/cuda_range.py`), which a
kernel reads as it reads the device. Shape letters as in ops/reference/tiers.py.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.selection import token_sequences
from forebay.ops.reference.tiers import TieredKv, TierOps, TierStep
from forebay.ops.triton.launch import kernel

_WORDS: Final = 256  # of 4 bytes, of a token that one program copies at once
_WARPS: Final = 16  # of one sequence's program: the sort of a hot buffer's columns is unrolled
_NEVER: Final = tl.constexpr(1 << 62)  # the age of a column that is not replaced


@triton.jit
def _on_host(table, position, valid, host_base, PAGE: tl.constexpr):
    """The locations of positions in the host tier, and their pages in full KV."""
    page = tl.load(table + position // PAGE, mask=valid, other=0)
    return host_base + page * PAGE + position % PAGE, page


@kernel
@triton.jit
def _place(
    selected,
    counts,
    page_table,
    rows,
    q_start,
    seq_lens,
    page_map,
    active,
    newest,
    positions,
    last_used,
    column_of,
    order,
    sources,
    locations,
    num_tokens,
    table_row,
    most,
    num_positions,
    hot_base,
    host_base,
    C: tl.constexpr,
    C_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    MOST_BLOCK: tl.constexpr,
):
    """Locations of what the queries of one sequence read, and where the tokens come from that have to be loaded.

    `column_of` [S, positions] int32 are -1, and `order` [S, C] and `sources` [T, N] int32 have any values. `sources`
    get the host location of a token that is copied to its location, else -1.
    """
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    first, stop = tl.load(q_start + seq).to(tl.int64), tl.load(q_start + seq + 1).to(tl.int64)
    now = tl.load(seq_lens + seq) - (stop - first).to(tl.int32)
    table = page_table + row * table_row
    j = tl.arange(0, MOST_BLOCK)
    if tl.load(active + row) == 0:
        for token in range(first, stop):
            live, valid = j < most, j < tl.load(counts + token)
            at = token * most + j
            position = tl.load(selected + at, mask=valid, other=0)
            on_host, page = _on_host(table, position, valid, host_base, PAGE)
            copy = tl.load(page_map + page, mask=valid, other=0)
            place = tl.where(copy != 0, copy * PAGE + position % PAGE, on_host)
            tl.store(locations + at, tl.where(valid, place, -1), mask=live)
            tl.store(sources + at, tl.zeros([MOST_BLOCK], tl.int32) - 1, mask=live)
        return

    base = (hot_base + row * (C + PAGE)).to(tl.int32)
    c = tl.arange(0, C_BLOCK)
    mine = column_of + seq.to(tl.int64) * num_positions
    held, used = positions + row * C, last_used + row * C
    there = tl.load(held + c, mask=c < C, other=-1)
    tl.store(mine + there, c, mask=there >= 0)
    tl.debug_barrier()
    num_selected, num_missing = first * 0, first * 0
    for token in range(first, stop):
        count = tl.load(counts + token)
        live, valid = j < most, j < count
        at = token * most + j
        position = tl.load(selected + at, mask=valid, other=0)
        is_new = valid & (tl.load(newest + row * PAGE + position % PAGE, mask=valid, other=-1) == position)
        column = tl.load(mine + position, mask=valid, other=-1)
        hit = valid & (column >= 0) & ~is_new
        tl.store(used + column, now + column * 0, mask=hit)
        place = tl.where(is_new, base + C + position % PAGE, tl.where(hit, base + column, -1))
        tl.store(locations + at, place, mask=live)
        tl.store(sources + at, tl.zeros([MOST_BLOCK], tl.int32) - 1, mask=live)
        num_selected += count
        num_missing += tl.sum((valid & ~is_new & ~hit).to(tl.int32), 0)
    tl.debug_barrier()
    num_loaded, num_taken = first * 0, first * 0
    if num_missing > 0:
        last = tl.load(used + c, mask=c < C, other=0)
        free = (c < C) & (last < now)
        num_free = tl.sum(free.to(tl.int32), 0)
        ages = tl.sort(tl.where(free, (last.to(tl.int64) << 32) | c, _NEVER))
        columns = order + seq.to(tl.int64) * C
        tl.store(columns + c, (ages & 0xFFFFFFFF).to(tl.int32), mask=c < num_free)
        tl.debug_barrier()
        for token in range(first, stop):
            valid = j < tl.load(counts + token)
            at = token * most + j
            missing = valid & (tl.load(locations + at, mask=valid, other=0) < 0)
            position = tl.load(selected + at, mask=missing, other=0)
            column = tl.load(mine + position, mask=missing, other=-1)  # an earlier query of the step has loaded it
            wanted = missing & (column < 0)
            rank = num_taken + tl.cumsum(wanted.to(tl.int32), 0) - 1
            taken = wanted & (rank < num_free)
            column = tl.where(taken, tl.load(columns + rank, mask=taken, other=0), column)
            tl.store(mine + position, column, mask=taken)
            tl.store(held + column, position, mask=taken)
            tl.store(used + column, now + column * 0, mask=taken)
            on_host, _ = _on_host(table, position, missing, host_base, PAGE)
            tl.store(locations + at, tl.where(column >= 0, base + column, on_host), mask=missing)
            tl.store(sources + at, on_host, mask=taken)
            num_loaded += tl.sum(wanted.to(tl.int32), 0)
            num_taken += tl.sum(taken.to(tl.int32), 0)
            tl.debug_barrier()
    tl.atomic_add(num_tokens, num_selected)
    tl.atomic_add(num_tokens + 1, num_loaded)


@kernel
@triton.jit
def _load_tokens(column, sources, locations, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a token's words of one column from the host tier to its hot buffer."""
    source = tl.load(sources + tl.program_id(0))
    if source < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(locations + tl.program_id(0)).to(tl.int64) * WORDS + at
    tl.store(column + to, tl.load(column + source.to(tl.int64) * WORDS + at, mask=at < WORDS), mask=at < WORDS)


class TritonTiers(TierOps):
    """See `TierOps`. `bind_newest` is the definition's, which reads nothing back."""

    def swap_in(self, positions: Tensor, counts: Tensor, paged: PagedKv, tiers: TieredKv, step: TierStep) -> PagedKv:
        (tokens, most), num_seqs, device = positions.shape, len(paged.rows), positions.device
        layout, num_positions = step.layout, paged.page_table.shape[1] * paged.page_size
        locations, sources = torch.empty(2, tokens, most, dtype=torch.int32, device=device)
        column_of = torch.full((num_seqs, num_positions), -1, dtype=torch.int32, device=device)
        order = torch.empty(num_seqs, layout.num_columns, dtype=torch.int32, device=device)
        copies = [
            ((column, sources, locations), {"WORDS": column.shape[1], "BLOCK": min(_WORDS, _block(column.shape[1]))})
            for column in _columns(tiers)
        ]
        for args, sizes in copies:  # so that a kernel that does not compile leaves everything as it was
            _load_tokens.require(*args, **sizes)
        if num_seqs:
            _place[(num_seqs,)](
                positions,
                counts,
                paged.page_table,
                paged.rows,
                paged.q_start,
                paged.seq_lens,
                step.page_map,
                step.active,
                step.newest,
                tiers.positions,
                tiers.last_used,
                column_of,
                order,
                sources,
                locations,
                step.counts,
                paged.page_table.stride(0),
                most,
                num_positions,
                layout.hot_base,
                layout.host_base,
                C=layout.num_columns,
                C_BLOCK=_block(layout.num_columns),
                PAGE=layout.page_size,
                MOST_BLOCK=_block(most),
                num_warps=_WARPS,
            )
            for args, sizes in copies:
                _load_tokens[(tokens * most, triton.cdiv(sizes["WORDS"], sizes["BLOCK"]))](*args, **sizes)
        numbers = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        return token_sequences(locations, numbers[:-1], numbers, counts, paged)


def _columns(tiers: TieredKv) -> list[Tensor]:
    """Return the columns of a layer as words [locations, words of a token]; values within keys are no column."""
    k, v, k_scale, v_scale = tiers.kv
    own = (k, k_scale) if v.data_ptr() == k.data_ptr() else (k, k_scale, v, v_scale)
    return [_words(tensor) for tensor in own if tensor is not None]


def _words(tensor: Tensor) -> Tensor:
    """View a token's entries as the widest integers of at most 4 bytes that fill its row."""
    flat = tensor.flatten(1)
    num_bytes = flat.shape[1] * flat.itemsize
    width = next(width for width in (4, 2, 1) if num_bytes % width == 0)
    return flat.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[width])


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))

"""Copies between the rows of the state tables. Shape letters as in ops/states.py."""

from __future__ import annotations

import math
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from forebay.ops.recurrence import StateBatch
from forebay.ops.states import StateColumns, Wishes

_BLOCK: Final = 4096  # items that one program copies
_ITEMS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # by bytes


@triton.jit
def _copy_row(table, source, to, num_items, BLOCK: tl.constexpr):
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = (at < num_items) & (to > 0) & (to != source)
    tl.store(table + to * num_items + at, tl.load(table + source * num_items + at, mask=live), mask=live)


@triton.jit
def _commit_states(
    places,
    slots,
    q_start,
    scratch,
    positions,
    num_new,
    wish_lens,
    wish_slots,
    ITEM: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    place = places + 2 * tl.program_id(1)
    first = tl.load(q_start + seq)
    if first == tl.load(q_start + seq + 1):
        return
    table = tl.load(place).to(tl.pointer_type(ITEM))
    num_items = tl.load(place + 1) // ITEM_BYTES
    slot = tl.load(slots + seq).to(tl.int64)
    most = tl.load(num_new + seq)
    behind = tl.load(scratch + first + most - 1, mask=most > 0, other=0).to(tl.int64)
    _copy_row(table, behind, tl.where(behind > 0, slot, 0), num_items, BLOCK)
    wished = tl.load(wish_lens + seq) - tl.load(positions + first)
    come_to = (wished > 0) & (wished <= most)
    behind = tl.load(scratch + first + wished - 1, mask=come_to, other=0).to(tl.int64)
    to = tl.where(come_to, tl.load(wish_slots + seq), 0).to(tl.int64)
    _copy_row(table, tl.where(behind > 0, behind, slot), to, num_items, BLOCK)


class TritonStates:
    """See `StateOps`."""

    def commit_states(
        self, columns: StateColumns, batch: StateBatch, positions: Tensor, num_new: Tensor, wishes: Wishes
    ) -> None:
        if not len(positions) or not columns.tables:
            return
        sizes = [table.stride(0) * table.itemsize for table in columns.tables]
        item_bytes = math.gcd(8, *sizes)
        item: Any = _ITEMS[item_bytes]
        grid = (len(batch.slots), len(sizes), triton.cdiv(max(sizes) // item_bytes, _BLOCK))
        _commit_states[grid](
            columns.places,
            batch.slots,
            batch.q_start,
            batch.snap_slots,
            positions,
            num_new,
            *wishes,
            ITEM=item,
            ITEM_BYTES=item_bytes,
            BLOCK=_BLOCK,
        )

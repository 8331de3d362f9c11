"""The memory that one request holds, for exactly as long as it holds any, and what it released early.

Of a row, from its beginning (tokens above, pages below; a page belongs where its first token does):

    0                      pin               kv_committed           kv_bound          extend_target
    |  cached and pinned    |  ours, written  |  ours, promised       |  ours, to come  |
    0 ................ pin.num_pages ............................................. num_pages

The cache owns the first part, others may read it too. Of the second, completed steps wrote every token, and its whole
pages are the cache's to adopt. The third is promised: a step in flight writes it, so it can be neither adopted nor
released yet. The last has pages and no launched step: known tokens whose turn has not come. Decoding moves `kv_bound`
on beyond `extend_target`, and the pages with it.

Where a step in flight verifies draft tokens, only the device knows how long the row is: `kv_bound` is as long as it
can become, and it comes back to what was accepted when the step commits. Until then there is no `kv_len`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from forebay.memory.radix_node import Pin
from forebay.memory.slots import NO_IDS, NO_OWNER, NO_SLOT, Ids, Slots


class Outrun(Exception):
    """The device may be behind the length that was asked for: a step in flight verifies draft tokens (C12)."""


class RowTable:
    """The host's table of rows: a column of int64 for each quantity, indexed by row as the device's are.

    A batch is an array of rows into it: filtering and merging batches moves ids, and no column can be forgotten (C9).
    Of `kv_bound` tokens `num_drafts` may turn out not to be accepted. Row 0 stays zero.
    """

    def __init__(self, num_rows: int, page_size: int) -> None:
        self.page_size = page_size
        self._block: Ids = np.zeros((6, num_rows), dtype=np.int64)
        self.request_id, self.max_kv_len, self.num_pages = self._block[:3]
        self.kv_committed, self.kv_bound, self.num_drafts = self._block[3:]
        self.allocations: list[Allocation | None] = [None] * num_rows  # who runs in each row

    def move_in(
        self, allocation: Allocation, *, max_kv_len: int, num_pages: int = 0, kv_len: int = 0, kv_committed: int = 0
    ) -> None:
        """Assign the row of `allocation` to its request, with `num_pages` pages and `kv_len` tokens of KV. The request
        ends at `max_kv_len` at the latest."""
        self.allocations[allocation.row] = allocation
        self._block[:, allocation.row] = allocation.id, max_kv_len, num_pages, kv_committed, kv_len, 0

    def move_out(self, row: int) -> None:
        """Mark a row as without a request; steps in flight may still compute there."""
        self.request_id[row] = NO_OWNER
        self.allocations[row] = None

    def allocation_of(self, row: int) -> Allocation:
        """Return the allocation of the request in this row; the row must be in use."""
        allocation = self.allocations[row]
        assert allocation is not None, f"nobody runs in row {row}"
        return allocation

    def kv_lens(self, rows: Ids) -> Ids:
        """How much KV launched steps leave in these rows. Raises Outrun where only the device knows."""
        if self.num_drafts[rows].any():
            raise Outrun(f"steps in flight verify draft tokens of rows {rows[self.num_drafts[rows] > 0]}")
        lens: Ids = self.kv_bound[rows]
        return lens

    def add_drafts(self, rows: Ids, counts: Ids) -> None:
        """Add `counts` draft tokens to the step of each row, behind the token that it computes anyway."""
        self.kv_bound[rows] += counts
        self.num_drafts[rows] += counts

    def commit(self, rows: Ids, kv_lens: Ids) -> None:
        """Record that a completed step computed `rows` up to `kv_lens`. Rows without a request are ignored."""
        run = self.request_id[rows] != NO_OWNER
        self.kv_committed[rows[run]] = kv_lens[run]

    def settle(self, rows: Ids, counts: Ids, num_new: Ids) -> None:
        """A step has completed that decoded `rows`: `num_new` tokens, of which it could be 1 + `counts`."""
        run = self.request_id[rows] != NO_OWNER
        rows, counts, num_new = rows[run], counts[run], num_new[run]
        self.kv_committed[rows] += num_new
        self.kv_bound[rows] -= 1 + counts - num_new
        self.num_drafts[rows] -= counts

    def clear(self) -> None:
        """Reset all columns and forget all requests; the caller has freed what they held."""
        self._block[:] = 0
        self.allocations = [None] * len(self.allocations)


class _Entry:
    """An allocation's entry of one column of the table."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, allocation: Allocation, owner: type[Allocation]) -> int:
        value: int = getattr(allocation.table, self._column).item(allocation.row)
        return value

    def __set__(self, allocation: Allocation, value: int) -> None:
        getattr(allocation.table, self._column)[allocation.row] = value


@dataclass(slots=True, eq=False)
class Allocation:
    """The memory of request `id`: a row, its first `pin.num_pages` pages through the prefix cache, the others up to
    `num_pages` itself. `extend_target` is how many tokens were known at its admission: extends go up to there. What it
    holds of other kinds of cache they know by its row. With a `ticket` another engine may read or write all of it,
    too."""

    table: RowTable
    id: int
    pin: Pin
    extend_target: int
    row: int = field(default=NO_SLOT, init=False)
    ticket: Transfer | None = field(default=None, init=False)

    num_pages = _Entry("num_pages")
    kv_bound = _Entry("kv_bound")  # tokens that launched steps write at most
    num_drafts = _Entry("num_drafts")  # of them, those that may not be accepted
    kv_committed = _Entry("kv_committed")  # those that completed steps wrote

    @property
    def kv_len(self) -> int:
        """Tokens that launched steps write. Raises Outrun where only the device knows."""
        if self.num_drafts:
            raise Outrun(f"steps in flight verify {self.num_drafts} draft tokens of request {self.id}")
        return self.kv_bound


def footprint(kv_len: int, page_size: int, held_pages: int = 0) -> int:
    """Pages that a request must still be given so that `kv_len` tokens have KV, when it holds `held_pages` already.
    Admission, allocation and the door ask here, so that they cannot disagree."""
    return max(0, -(-kv_len // page_size) - held_pages)


def num_at_once(num_pages: int, page_size: int, most: int, length: int) -> int:
    """How many requests of `length` tokens, prompt and output together, may run at once."""
    return min(most, num_pages // footprint(length, page_size))


def footprint_ahead(
    kv_len: Ids | int, max_kv_len: Ids | int, num_reserved: int, page_size: int, held_pages: Ids | int = 0
) -> Ids:
    """Return the pages that one or many decoding requests must still be given, so that each has room for `num_reserved`
    tokens more, or up to its limit. Free places of its last page count."""
    longest = np.minimum(kv_len + num_reserved, max_kv_len)
    pages: Ids = np.maximum(-(-longest // page_size) - held_pages, 0)
    return pages


class Fence(Protocol):
    """A condition until which released memory may still be accessed. It opens once."""

    @property
    def is_open(self) -> bool: ...


class Transfer(Fence, Protocol):
    """Between a request's places here and another engine, which may touch them until it is open."""

    @property
    def whole(self) -> bool:
        """Whether it may touch all that the request holds, and not its pages of KV alone."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the transfer has ended on this engine."""
        ...


class Steps:
    """Which step was launched last, and which of them committed last."""

    def __init__(self) -> None:
        self.launched = self.committed = 0

    def fence(self) -> StepFence:
        """Open when all that is launched by now has committed."""
        return StepFence(self, self.launched)


@dataclass(frozen=True, slots=True)
class StepFence:
    """Open when `step`, and with it all before it, has committed."""

    steps: Steps
    step: int

    @property
    def is_open(self) -> bool:
        return self.step <= self.steps.committed


class _Releases(Protocol):
    slots: Slots

    def return_slots(self, holding: Holding, owner: int) -> None: ...


class Holding(NamedTuple):
    """Slots of one kind of cache that are released: slots of its owner's, and what of the cache's that had `locked`."""

    kind: _Releases
    ids: Ids = NO_IDS
    locked: Any = NO_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredFree:
    """The rest of an allocation, or a part that it gave up: released when `fence` is open, and with a `ticket` that one
    too. Whatever it did not have is empty."""

    fence: Fence
    ticket: Transfer | None = None
    request_id: int
    row: int = NO_SLOT  # NO_SLOT when it kept its row
    pages: Ids = field(default_factory=lambda: NO_IDS)  # its own KV pages
    pin: Pin | None = None
    holdings: Sequence[Holding] = ()

    @property
    def is_free(self) -> bool:
        return self.fence.is_open and (self.ticket is None or self.ticket.is_open)

    @property
    def num_pages(self) -> int:
        """Pages that become available when this is released, at most."""
        return len(self.pages) + (self.pin.num_pages if self.pin else 0)

"""Sliding windows: pages of their own, found through the full page of the same tokens (C5, C18).

A window page belongs to the owner of its full page, and is released before it: by a request when the window has moved
past it, by the prefix cache when its slot is needed elsewhere. A hit needs one contiguous window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from forebay.base.units import ceil_div
from forebay.config.engine_config import Ledger
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, Holding, RowTable
from forebay.memory.kinds.kind import (
    AdoptedKind,
    Arrival,
    ExtendedKind,
    GrownKind,
    HeldKind,
    Kind,
    LockedKind,
    PagedKind,
    PlannedKind,
    Reserve,
    RestartedKind,
    TransferredKind,
    TreeKind,
    TrimmedKind,
)
from forebay.memory.kinds.window.cached_windows import (
    WINDOW,
    CachedWindows,
    WindowMap,
    WindowTier,
)
from forebay.memory.miss_reason import MissReason
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import Holder, Ids, all_equal


class Windows(
    TreeKind,
    HeldKind,
    ExtendedKind,
    GrownKind,
    TrimmedKind,
    PagedKind,
    AdoptedKind,
    TransferredKind,
    LockedKind,
    RestartedKind,
    PlannedKind,
):
    """The windows of requests, over the `map` of all window pages; `in_tree` has those of the prefix cache.

    A request holds the windows of its pages from `start[row]` on: those of its pinned pages are locked, the others are
    its own. Each row is promised its share of the `reserve`. Admission gives out no row without its share: slots that
    other engines may access, or that are quarantined, do not count. The window moves with the tokens that completed
    steps have written. So no step in flight reads the pages behind it, which can be freed at once; and tokens that a
    step in flight writes have their whole window when the cache adopts them.

    The device's copy of the map learns of changes through the window page writes of a step's plan. Entries that became
    0 are not sent: they are written again before a step reads them.
    """

    in_tree: CachedWindows
    name: ClassVar[str] = WINDOW
    missing: ClassVar[MissReason] = MissReason.WINDOW_MISSING

    def __init__(
        self,
        num_window_pages: int,
        num_pages: int,
        rows: ReqToTokenPool,
        *,
        window: int,
        margin: int = 0,
        reserve: Reserve = Kind.reserve,
        ledger: Ledger = Ledger.RAISE,
    ) -> None:
        self.map = WindowMap(num_window_pages, num_pages, page_size=rows.page_size, window=window, ledger=ledger)
        self.in_tree = CachedWindows(self.map)
        self._in_tiers = WindowTier(self.in_tree)
        self.slots, self.margin, self.reserve = self.map.slots, margin, reserve
        self.start: Ids = np.zeros(rows.slots.num_rows, dtype=np.int64)
        self._counted = np.zeros_like(self.map.locks)  # of `check_locks`, which runs after MemoryError too
        self._rows = rows

    def first_kept(self, kv_len: int | Ids) -> Ids:
        """Return the index of the first page whose window a request with `kv_len` tokens keeps."""
        first: Ids = np.maximum(np.asarray(kv_len) - self.map.window - self.margin + 1, 0) // self.map.page_size
        return first

    def take(self, pages: Ids, owner: int | Ids) -> None:
        """Allocate a window page for each of `pages`, which have none. Raises OutOfSlots and takes none when short."""
        self.in_tree.make_room(len(pages))
        self.map.full_to_window[pages] = self.slots.take_ids(len(pages), owner)
        self.map.begins[pages] = 0

    def admit(self, allocation: Allocation, arrival: Arrival, draft: Draft) -> None:
        """Give the request its window pages. A prompt from elsewhere may be so long that its window begins behind that
        of the pin."""
        row, num_pinned = allocation.row, allocation.pin.num_pages
        first = self.start[row] = self.map.first_needed(allocation.kv_len)
        if arrival.from_elsewhere:
            left = self.map.first_needed(num_pinned * self.map.page_size)
            self.map.unlock(self._rows.pages(row, left, min(first, num_pinned)))
            pages = self._rows.pages(row, max(num_pinned, first), ceil_div(allocation.kv_len, self.map.page_size))
            self.grow(pages, allocation.id, draft)
            # No more need have come than is read, whole pages or no: of a host copy, too, of what came from an engine.
            self.map.begins[pages[:1]] = max(0, allocation.kv_len - self.map.window + 1 - first * self.map.page_size)

    def transfer_slots(self, allocation: Allocation, pages: Ids, start: int = 0) -> Ids:
        """Return the window slots of the pages that are still read."""
        ids: Ids = self.map.full_to_window[pages[max(start, self.map.first_needed(allocation.kv_len)) :]].astype(
            np.int64
        )
        return ids

    def extend(self, allocation: Allocation, stop: int, draft: Draft) -> None:
        first, last = ceil_div(allocation.kv_len, self.map.page_size), ceil_div(stop, self.map.page_size)
        if first < last:
            self.grow(self._rows.pages(allocation.row, first, last), allocation.id, draft)

    def grow(self, pages: Ids, owners: Ids | int, draft: Draft) -> None:
        self.take(pages, owners)
        draft.remap(pages)

    def trim(self, table: RowTable, rows: Ids) -> None:
        """Free the window pages behind the window of each request's last completed token."""
        first = self.first_kept(table.kv_committed[rows])
        moved = first > self.start[rows]
        for row, stop in zip(rows[moved].tolist(), first[moved].tolist(), strict=True):
            self._trim(table.allocation_of(row), stop)

    def _trim(self, allocation: Allocation, stop: int) -> None:
        self.return_slots(self._detach(allocation, stop), allocation.id)
        self.start[allocation.row] = stop

    def _detach(self, allocation: Allocation, stop: int) -> Holding:
        """The windows of its own pages up to page `stop`, which no longer have them, and the pinned pages there."""
        start = int(self.start[allocation.row])
        pages = self._rows.pages(allocation.row, start, stop)
        num_pinned = min(max(allocation.pin.num_pages - start, 0), len(pages))
        return Holding(self, self.map.detach(pages[num_pinned:]), pages[:num_pinned])

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        pages = draft.remapped
        if not len(pages):
            return {}
        return {"map_pages": pages, "map_windows": self.map.full_to_window[pages].astype(np.int64)}

    def release_pages(self, pages: Ids) -> Holding:
        return Holding(self, self.map.detach(pages))

    def release_all(self, allocation: Allocation) -> Holding:
        first = int(self.first_kept(allocation.kv_committed))
        if first > self.start[allocation.row]:
            self._trim(allocation, first)
        return self._detach(allocation, allocation.num_pages)

    def return_slots(self, holding: Holding, owner: int) -> None:
        self.slots.return_ids(holding.ids, owner)
        self.map.unlock(holding.locked)

    def start_over(self, draft: Draft) -> None:
        """Send the whole map again: the device may lack the changes of the void steps."""
        draft.remap(np.flatnonzero(self.map.full_to_window))

    def adopted(self, allocation: Allocation, start: int, end: int) -> None:
        """Lock the last of the adopted pages, whose windows the request still reads."""
        first, stop = max(start, int(self.start[allocation.row])), end // self.map.page_size
        if first < stop:
            self.map.lock(self._rows.pages(allocation.row, first, stop))

    def clear(self) -> None:
        self.in_tree.clear()

    # -- checking -----------------------------------------------------------------------------------------------------

    def holder(self, allocation: Allocation) -> Holder:
        return Holder(
            allocation.id,
            self.map.window_pages(self._rows.pages(allocation.row, allocation.pin.num_pages, allocation.num_pages)),
        )

    def check_locks(self, allocations: Iterable[Allocation], holdings: Iterable[Holding]) -> None:
        locks = self._counted
        locks[:] = 0
        for allocation in allocations:
            locks[self._rows.pages(allocation.row, int(self.start[allocation.row]), allocation.pin.num_pages)] += 1
        for holding in holdings:
            locks[holding.locked] += 1
        assert all_equal(locks, self.map.locks), "a cached window is locked by nobody, or read and not locked"
        assert self.map.is_there(np.flatnonzero(locks)).all(), "a window that a request reads is not there"
        assert self.map.num_locked == np.count_nonzero(locks), "the number of locked windows is miscounted"

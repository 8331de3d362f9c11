"""Sliding windows: pages of their own, found through the full page of the same tokens (C5, C18).

A window page belongs to whoever holds its full page, and goes before it: a request gives it back when the window has
moved past it, the prefix cache when somebody needs it more. `full_to_window[page]` 0 says that it is not there. A hit
needs one contiguous window.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from forebay.base.units import ceil_div
from forebay.config.engine_config import Ledger
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, Holding, RowTable
from forebay.memory.kinds.kind import Arrival, Kind, Reserve
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import CACHE, NO_IDS, NO_SLOT, Holder, Ids, Slots, all_equal

WINDOW: Final = "window"


class Windows(Kind):
    """`num_window_pages` pages for the `num_pages` full pages, and which is whose.

    A request holds the windows of its pages from `start[row]` on: those of its pinned pages are locked, the others are
    its own. Each row is promised its share of the `reserve`, and admission gives out no row whose share is not there:
    what other engines may still touch, and what is quarantined, is not. The window moves with what completed steps have
    written. So no step in flight reads what it moves past, which can be given back at once; and what a step in flight
    writes has its whole window when the cache adopts it.

    `locks[page]` counts the requests that still read a cached page's window. One that came from elsewhere may lack its
    first tokens: it `begins` behind as many, and nobody goes on from it who would read them. The device's copy of
    `full_to_window` learns of changes through the window page writes of a step's plan; entries that became 0 are not
    sent: nobody reads them before they are written again.
    """

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
        self.slots = Slots("window", num_window_pages, ledger=ledger)
        self.page_size, self.window, self.margin, self.reserve = rows.page_size, window, margin, reserve
        self.start: Ids = np.zeros(rows.slots.num_rows, dtype=np.int64)
        self.full_to_window: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self.locks: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self._counted = np.zeros_like(self.locks)  # of `check_locks`, which runs after MemoryError too
        self.begins: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self._rows = rows
        # By tenant those nodes that may have windows, the least recently used first.
        self._nodes: defaultdict[str, OrderedDict[Node, None]] = defaultdict(OrderedDict)

    def first_needed(self, kv_len: int) -> int:
        """Index of the first page that the query at position `kv_len` reads, or any query after it."""
        return max(0, kv_len - self.window + 1) // self.page_size

    def first_kept(self, kv_len: int | Ids) -> Ids:
        """Index of the first page whose window a request with `kv_len` tokens goes on holding."""
        first: Ids = np.maximum(np.asarray(kv_len) - self.window - self.margin + 1, 0) // self.page_size
        return first

    def is_there(self, pages: Ids) -> npt.NDArray[np.bool_]:
        there: npt.NDArray[np.bool_] = self.full_to_window[pages] != NO_SLOT
        return there

    # -- pages of requests --------------------------------------------------------------------------------------------

    def take(self, pages: Ids, owner: int | Ids) -> None:
        """A window page for each of `pages`, which have none. Raises OutOfSlots and takes none when short."""
        self.make_room(len(pages))
        self.full_to_window[pages] = self.slots.take_ids(len(pages), owner)
        self.begins[pages] = 0

    def detach(self, pages: Ids) -> Ids:
        """Take those window pages of `pages` that are there away from them; they are the caller's to return."""
        windows = self.full_to_window[pages]
        self.full_to_window[pages] = NO_SLOT
        ids: Ids = windows[windows != NO_SLOT].astype(np.int64)
        return ids

    def admit(self, held: Allocation, arrival: Arrival, draft: Draft) -> None:
        """Give the request its window pages. A prompt from elsewhere may be so long that its window begins behind that
        of the pin."""
        row, num_pinned = held.row, held.pin.num_pages
        first = self.start[row] = self.first_needed(held.kv_len)
        if arrival.from_elsewhere:
            left = self.first_needed(num_pinned * self.page_size)
            self.unlock_windows(self._rows.pages(row, left, min(first, num_pinned)))
            pages = self._rows.pages(row, max(num_pinned, first), ceil_div(held.kv_len, self.page_size))
            self.grow(pages, held.id, draft)
            # No more need have come than is read, whole pages or no: of a host copy, too, of what came from an engine.
            self.begins[pages[:1]] = max(0, held.kv_len - self.window + 1 - first * self.page_size)

    def transfer_slots(self, held: Allocation, pages: Ids, start: int = 0) -> Ids:
        """Return the window slots of the pages that are still read."""
        ids: Ids = self.full_to_window[pages[max(start, self.first_needed(held.kv_len)) :]].astype(np.int64)
        return ids

    def extend(self, held: Allocation, stop: int, draft: Draft) -> None:
        first, last = ceil_div(held.kv_len, self.page_size), ceil_div(stop, self.page_size)
        if first < last:
            self.grow(self._rows.pages(held.row, first, last), held.id, draft)

    def grow(self, pages: Ids, owners: Ids | int, draft: Draft) -> None:
        self.take(pages, owners)
        draft.remap(pages)

    def trim(self, table: RowTable, rows: Ids) -> None:
        """Give back what lies behind the window of each request's last completed token."""
        first = self.first_kept(table.kv_committed[rows])
        moved = first > self.start[rows]
        for row, stop in zip(rows[moved].tolist(), first[moved].tolist(), strict=True):
            self._trim(table.allocation_of(row), stop)

    def _trim(self, held: Allocation, stop: int) -> None:
        self.return_slots(self._detach(held, stop), held.id)
        self.start[held.row] = stop

    def _detach(self, held: Allocation, stop: int) -> Holding:
        """The windows of its own pages up to page `stop`, which no longer have them, and the pinned pages there."""
        start = int(self.start[held.row])
        pages = self._rows.pages(held.row, start, stop)
        num_pinned = min(max(held.pin.num_pages - start, 0), len(pages))
        return Holding(self, self.detach(pages[num_pinned:]), pages[:num_pinned])

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        pages = draft.remapped
        return {"map_pages": pages, "map_windows": self.full_to_window[pages].astype(np.int64)} if len(pages) else {}

    def release_pages(self, pages: Ids) -> Holding:
        return Holding(self, self.detach(pages))

    def release_all(self, held: Allocation) -> Holding:
        first = int(self.first_kept(held.kv_committed))
        if first > self.start[held.row]:
            self._trim(held, first)
        return self._detach(held, held.num_pages)

    def return_slots(self, holding: Holding, owner: int) -> None:
        self.slots.return_ids(holding.ids, owner)
        self.unlock_windows(holding.locked)

    def start_over(self, draft: Draft) -> None:
        """The device may lack what the void steps were to tell it; the rest does no harm."""
        draft.remap(np.flatnonzero(self.full_to_window))

    # -- pages of the prefix cache ------------------------------------------------------------------------------------

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        gaps = np.flatnonzero(~self.is_there(pages[:longest]) | (self.begins[pages[:longest]] > 0))
        n = longest
        while n > 0:
            below = int(np.searchsorted(gaps, n))  # gaps[:below] are in front of page n
            if below == 0 or gaps[below - 1] < self.first_needed(n * self.page_size):
                return n
            n = int(gaps[below - 1])  # a gap in the window: the next place that could do ends in front of it
        return 0

    def lock_windows(self, pages: Ids) -> None:
        """Keep the windows of cached pages, which are there, from eviction."""
        self.num_locked += int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += 1

    def unlock_windows(self, pages: Ids) -> None:
        self.locks[pages] -= 1
        left = self.locks[pages]
        assert (left >= 0).all(), f"windows of pages {pages} were unlocked more often than locked"
        self.num_locked -= int(np.count_nonzero(left == 0))

    def lock(self, node: Node, pages: Ids) -> None:
        self.lock_windows(self._last(pages))

    def unlock(self, node: Node, pages: Ids) -> None:
        self.unlock_windows(self._last(pages))

    def _last(self, pages: Ids) -> Ids:
        """Return those of a prefix's pages whose windows are needed behind it."""
        return pages[self.first_needed(len(pages) * self.page_size) :]

    def adopted(self, held: Allocation, start: int, end: int) -> None:
        """The request goes on reading the last of them."""
        first, stop = max(start, int(self.start[held.row])), end // self.page_size
        if first < stop:
            self.lock_windows(self._rows.pages(held.row, first, stop))

    def num_kept(self, node: Node) -> int:
        return int(np.count_nonzero(self.is_there(node.pages)))

    def evict(self, num_slots: int) -> int:
        """Evict pages, first those of the tenant that holds the most for its weight (C32)."""
        missing = num_slots
        for tenant, rest in self.shares.turns() if missing > 0 else ():
            missing -= self._evict_of(tenant, rest, missing)
            if missing <= 0:
                break
        if missing < num_slots:
            self.tree.lost(())
        return num_slots - missing

    def _evict_of(self, tenant: str, rest: int, most: int) -> int:
        """Free up to `most` windows of a tenant, node by node until it holds no more than `rest`; how many. Of a node
        the first pages go first: whoever resumes at its end needs only the last ones."""
        nodes, missing, emptied = self._nodes[tenant], most, []
        for node in nodes:
            if missing <= 0 or self.shares.held[tenant] <= rest:
                break
            missing -= self._evict_from_node(node, missing)
            if not self.is_there(node.pages).any():
                emptied.append(node)
        for node in emptied:
            del nodes[node]
        return most - missing

    def _evict_from_node(self, node: Node, most: int) -> int:
        count = self.evict_from(node.pages, most)
        self.shares.add(node.tenant, -count)
        return count

    def evict_from(self, pages: Ids, most: int) -> int:
        """Free up to `most` unlocked windows of cached pages, the first ones; how many."""
        ids = self.detach(pages[self.is_there(pages) & (self.locks[pages] == 0)][:most])
        self.num_cached -= len(ids)
        self.slots.return_ids(ids, CACHE)
        return len(ids)

    def touch(self, node: Node, num_pages: int) -> None:
        first = self.first_needed(num_pages * self.page_size)
        step: Node | None = node
        while step is not None and step.parent is not None and num_pages > first:
            nodes = self._nodes[step.tenant]
            nodes[step] = None
            nodes.move_to_end(step)
            num_pages -= len(step.pages)
            step = step.parent

    def attached(self, node: Node, owner: int) -> None:
        self.shares.add(node.tenant, self.give_to_cache(node.pages, owner))
        self._nodes[node.tenant][node] = None

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> Ids:
        """The cache takes over the windows that it had lost, those that begin before its own, and those that do as well
        as its own that no request reads. What it had instead is freed at once if no request reads it, so that the
        request goes on reading no more windows than it was promised; else it is the request's to let go of: no step in
        flight may read it then."""
        there, idle = self.is_there(cached), self.locks[cached] == 0
        later = self.begins[own] - self.begins[cached]
        better = self.is_there(own) & (~there | (later < 0) | ((later == 0) & idle))
        own, cached, there, idle = own[better], cached[better], there[better], (there & idle)[better]
        if len(own):
            kept = [self.num_kept(node) for node in nodes]
            for column in (self.full_to_window, self.begins):
                column[own], column[cached] = column[cached], column[own]
            self.slots.transfer(self.full_to_window[own[there]].astype(np.int64), CACHE, owner)
            self.num_cached -= int(np.count_nonzero(there))
            self.give_to_cache(cached, owner)
            self.slots.return_ids(self.detach(own[idle]), owner)
            for node, before in zip(nodes, kept, strict=True):
                self.shares.add(node.tenant, self.num_kept(node) - before)
        for node in nodes:
            self._nodes[node.tenant][node] = None
        return cached

    def give_to_cache(self, pages: Ids, owner: int) -> int:
        """The cache adopts `pages`, and with them the window pages that are there; how many."""
        windows = self.full_to_window[pages]
        ids = windows[windows != NO_SLOT].astype(np.int64)
        self.slots.transfer(ids, owner, CACHE)
        self.num_cached += len(ids)
        return len(ids)

    def split(self, upper: Node, lower: Node) -> None:
        """The upper part stands first: whoever resumes further down needs it less."""
        nodes = self._nodes[upper.tenant]
        nodes[upper] = None
        nodes.move_to_end(upper, last=False)

    def removed(self, node: Node) -> None:
        self._evict_from_node(node, len(node.pages))
        self._nodes[node.tenant].pop(node, None)

    def clear(self) -> None:
        """No page has a window, and every one is free."""
        self.slots.clear()
        self.full_to_window[:] = NO_SLOT
        self.locks[:] = 0
        self.num_cached = self.num_locked = 0
        self.start[:] = 0
        self._nodes.clear()
        self.shares.clear()

    # -- checking -----------------------------------------------------------------------------------------------------

    def holder(self, held: Allocation) -> Holder:
        windows = self.full_to_window[self._rows.pages(held.row, held.pin.num_pages, held.num_pages)]
        return Holder(held.id, windows[windows != NO_SLOT].astype(np.int64))

    def check(self, nodes: Iterable[Node]) -> None:
        held: Counter[str] = Counter()
        for node in nodes:
            held[node.tenant] += self.num_kept(node)
        assert held == self.shares.held, f"tenants have {held} windows; booked {self.shares.held}"

    def check_locks(self, allocations: Iterable[Allocation], holdings: Iterable[Holding]) -> None:
        locks = self._counted
        locks[:] = 0
        for held in allocations:
            locks[self._rows.pages(held.row, int(self.start[held.row]), held.pin.num_pages)] += 1
        for holding in holdings:
            locks[holding.locked] += 1
        assert all_equal(locks, self.locks), "a cached window is locked by nobody, or read and not locked"
        assert self.is_there(np.flatnonzero(locks)).all(), "a window that a request reads is not there"
        assert self.num_locked == np.count_nonzero(locks), "the number of locked windows is miscounted"

    def cached(self, nodes: Iterable[Node]) -> Holder:
        windows = np.concatenate([NO_IDS, *(self.full_to_window[node.pages] for node in nodes)])
        return Holder(CACHE, windows[windows != NO_SLOT].astype(np.int64))

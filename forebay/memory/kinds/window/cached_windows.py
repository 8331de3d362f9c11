"""Which full page has which window page, and the windows that the prefix cache keeps (C5, C18)."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from forebay.config.engine_config import Ledger
from forebay.memory.kinds.kind import (
    AttachedKind,
    CachedPart,
    CheckedKind,
    Kept,
    ReplacedKind,
    ResumedKind,
    RetainedKind,
    TieredKind,
)
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node, Pin
from forebay.memory.slots import CACHE, NO_IDS, NO_SLOT, Holder, Ids, Slots

WINDOW: Final = "window"


class WindowMap:
    """`num_window_pages` window pages for the `num_pages` full pages.

    `full_to_window[page]` is 0 if a page has none. `locks[page]` counts the requests that read a cached page's window,
    and `retained[page]` the retained prefixes at whose end it is read.
    A window page that was copied from elsewhere may lack its first tokens: `begins[page]` is their number, and a
    request that would read them cannot resume there. Columns are int32 `[num_pages + 1]`; page 0 is the padding page.
    """

    def __init__(
        self, num_window_pages: int, num_pages: int, *, page_size: int, window: int, ledger: Ledger = Ledger.RAISE
    ) -> None:
        self.slots = Slots(WINDOW, num_window_pages, ledger=ledger)
        self.page_size, self.window = page_size, window
        self.full_to_window: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self.locks: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self.retained: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self.begins: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self.num_locked = 0

    def first_needed(self, kv_len: int) -> int:
        """Return the index of the first page that the query at position `kv_len` reads, or any query after it."""
        return max(0, kv_len - self.window + 1) // self.page_size

    def last_read(self, pages: Ids) -> Ids:
        """Return the pages of a prefix whose windows are read by a request that resumes at its end."""
        return pages[self.first_needed(len(pages) * self.page_size) :]

    def is_there(self, pages: Ids) -> npt.NDArray[np.bool_]:
        """Return for each page whether it has a window page."""
        there: npt.NDArray[np.bool_] = self.full_to_window[pages] != NO_SLOT
        return there

    def window_pages(self, pages: Ids) -> Ids:
        """Return the window pages of those of `pages` that have one."""
        windows = self.full_to_window[pages]
        ids: Ids = windows[windows != NO_SLOT].astype(np.int64)
        return ids

    def detach(self, pages: Ids) -> Ids:
        """Remove the window pages of `pages` from the map, and return them; the caller must return them to the pool."""
        ids = self.window_pages(pages)
        self.full_to_window[pages] = NO_SLOT
        return ids

    def lock(self, pages: Ids) -> None:
        """Keep the windows of these cached pages, which have one, from eviction."""
        self.num_locked += int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += 1

    def unlock(self, pages: Ids) -> None:
        """Release a lock on each of these pages."""
        self.locks[pages] -= 1
        counts = self.locks[pages]
        assert (counts >= 0).all(), f"windows of pages {pages} were unlocked more often than locked"
        self.num_locked -= int(np.count_nonzero(counts == 0))

    def has_unlocked(self, pages: Ids) -> bool:
        """Return whether some of the windows at the end of a prefix are read by no request."""
        return bool((self.locks[self.last_read(pages)] == 0).any())

    def clear(self) -> None:
        """Free every window page, and forget all locks."""
        self.slots.clear()
        self.full_to_window[:] = NO_SLOT
        self.locks[:] = 0
        self.retained[:] = 0
        self.num_locked = 0


class CachedWindows(CachedPart, AttachedKind, ResumedKind, ReplacedKind, CheckedKind):
    """Window pages of cached pages. A hit needs one contiguous window at its end.

    The tenant of a node is charged for its windows, and the tenant that has the most for its weight loses the next
    (C32): of its least recently used node the first ones.
    """

    name: ClassVar[str] = WINDOW
    missing: ClassVar[MissReason] = MissReason.WINDOW_MISSING

    def __init__(self, window_map: WindowMap) -> None:
        self.map, self.slots = window_map, window_map.slots
        # By tenant those nodes that may have windows, the least recently used first.
        self._nodes: defaultdict[str, OrderedDict[Node, None]] = defaultdict(OrderedDict)

    @property
    def num_locked(self) -> int:  # type: ignore[override]
        return self.map.num_locked

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        gaps = np.flatnonzero(~self.map.is_there(pages[:longest]) | (self.map.begins[pages[:longest]] > 0))
        n = longest
        while n > 0:
            below = int(np.searchsorted(gaps, n))  # gaps[:below] are in front of page n
            if below == 0 or gaps[below - 1] < self.map.first_needed(n * self.map.page_size):
                return n
            n = int(gaps[below - 1])  # a gap in the window: the next place that could do ends in front of it
        return 0

    def lock(self, node: Node, pages: Ids) -> None:
        self.map.lock(self.map.last_read(pages))

    def unlock(self, node: Node, pages: Ids) -> None:
        self.map.unlock(self.map.last_read(pages))

    def num_kept(self, node: Node) -> int:
        return int(np.count_nonzero(self.map.is_there(node.pages)))

    def evict(self, num_slots: int) -> int:
        """Evict pages, first those of the tenant that holds the most for its weight (C32). If only retained ones are
        left, their retention ends, one prefix after another."""
        missing = num_slots - self._evict_unretained(num_slots)
        while missing > 0 and self.tree.retention.give_up(lambda _, pages: self.map.has_unlocked(pages)):
            missing -= self._evict_unretained(missing)
        if missing < num_slots:
            self.tree.lost(())
        return num_slots - missing

    def _evict_unretained(self, most: int) -> int:
        missing = most
        for tenant, target in self.shares.turns() if missing > 0 else ():
            missing -= self._evict_of(tenant, target, missing)
            if missing <= 0:
                break
        return most - missing

    def _evict_of(self, tenant: str, target: int, most: int) -> int:
        """Free up to `most` windows of a tenant, node by node until it has no more than `target`, and return their
        number. The first pages of a node go first: a request that resumes at its end reads only the last ones."""
        nodes, missing, emptied = self._nodes[tenant], most, []
        for node in nodes:
            if missing <= 0 or self.shares.held[tenant] <= target:
                break
            missing -= self._evict_from_node(node, missing)
            if not self.map.is_there(node.pages).any():
                emptied.append(node)
        for node in emptied:
            del nodes[node]
        return most - missing

    def _evict_from_node(self, node: Node, most: int) -> int:
        count = self.evict_from(node.pages, most)
        self.shares.add(node.tenant, -count)
        if self.tree.watcher is not None:
            self.tree.watcher.changed(node)
        return count

    def evict_from(self, pages: Ids, most: int) -> int:
        """Free up to `most` windows of cached pages that are not locked or retained, the first ones; how many."""
        spare = (self.map.locks[pages] == 0) & (self.map.retained[pages] == 0)
        ids = self.map.detach(pages[self.map.is_there(pages) & spare][:most])
        self.num_cached -= len(ids)
        self.slots.return_ids(ids, CACHE)
        return len(ids)

    def touch(self, node: Node, num_pages: int) -> None:
        first = self.map.first_needed(num_pages * self.map.page_size)
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
        request continues to read no more windows than it was promised; else the request frees it: no step in flight
        may read it then."""
        there, idle = self.map.is_there(cached), self.map.locks[cached] == 0
        later = self.map.begins[own] - self.map.begins[cached]
        better = self.map.is_there(own) & (~there | (later < 0) | ((later == 0) & idle))
        own, cached, there, idle = own[better], cached[better], there[better], (there & idle)[better]
        if len(own):
            kept = [self.num_kept(node) for node in nodes]
            for column in (self.map.full_to_window, self.map.begins):
                column[own], column[cached] = column[cached], column[own]
            self.slots.transfer(self.map.full_to_window[own[there]].astype(np.int64), CACHE, owner)
            self.num_cached -= int(np.count_nonzero(there))
            self.give_to_cache(cached, owner)
            self.slots.return_ids(self.map.detach(own[idle]), owner)
            for node, before in zip(nodes, kept, strict=True):
                self.shares.add(node.tenant, self.num_kept(node) - before)
        for node in nodes:
            self._nodes[node.tenant][node] = None
            if self.tree.watcher is not None:
                self.tree.watcher.changed(node)
        return cached

    def give_to_cache(self, pages: Ids, owner: int) -> int:
        """The cache adopts `pages`, and with them the window pages that are there; how many."""
        ids = self.map.window_pages(pages)
        self.slots.transfer(ids, owner, CACHE)
        self.num_cached += len(ids)
        return len(ids)

    def split(self, upper: Node, lower: Node) -> None:
        """Evict the upper part first: a request that resumes further down needs it less."""
        nodes = self._nodes[upper.tenant]
        nodes[upper] = None
        nodes.move_to_end(upper, last=False)

    def removed(self, node: Node) -> None:
        self._evict_from_node(node, len(node.pages))
        self._nodes[node.tenant].pop(node, None)

    def clear(self) -> None:
        """Forget all nodes, and free all window pages."""
        self.map.clear()
        self.num_cached = 0
        self._nodes.clear()
        self.shares.clear()

    def cached(self, nodes: Iterable[Node]) -> Holder:
        ids = [self.map.window_pages(node.pages) for node in nodes]
        return Holder(CACHE, np.concatenate([NO_IDS, *ids]))

    def check(self, nodes: Iterable[Node]) -> None:
        held: Counter[str] = Counter()
        for node in nodes:
            held[node.tenant] += self.num_kept(node)
        assert held == self.shares.held, f"tenants have {held} windows; booked {self.shares.held}"


class RetainedWindows(RetainedKind):
    """The windows at the ends of retained prefixes."""

    name: ClassVar[str] = WINDOW

    def __init__(self, window_map: WindowMap) -> None:
        self._map, self.slots = window_map, window_map.slots

    def num_retained(self, pages: Ids) -> int:
        return len(self._map.last_read(pages))

    def retain(self, node: Node, pages: Ids) -> None:
        self._map.retained[self._map.last_read(pages)] += 1

    def end_retention(self, node: Node, pages: Ids) -> None:
        self._map.retained[self._map.last_read(pages)] -= 1

    def is_retained(self, node: Node, pages: Ids) -> bool:
        last = self._map.last_read(pages)
        return bool((self._map.is_there(last) & (self._map.retained[last] > 0)).all())


class WindowTier(TieredKind):
    """Windows in the tiers of the prefix cache: they are copied with their pages."""

    name: ClassVar[str] = WINDOW
    at_ends: ClassVar[bool] = False
    spec_kind: ClassVar[str] = "sliding_window"

    def __init__(self, cached: CachedWindows) -> None:
        self.in_tree, self._map = cached, cached.map
        self.span: int | None = cached.map.window
        self.retained = RetainedWindows(cached.map)

    def of_tier(self, num_slots: int, num_pages: int) -> WindowTier:
        ours = self._map
        size, window, ledger = ours.page_size, ours.window, ours.slots.ledger
        return WindowTier(CachedWindows(WindowMap(num_slots, num_pages, page_size=size, window=window, ledger=ledger)))

    def kept(self, nodes: Sequence[Node], pages: Ids) -> Kept:
        at = np.flatnonzero(self._map.is_there(pages) & (self._map.begins[pages] == 0))
        return Kept(at + 1, self._map.full_to_window[pages[at]].astype(np.int64))

    def first_read(self, num_pages: int) -> int:
        return self._map.first_needed(num_pages * self._map.page_size) + 1

    def lend(self, pages: Ids, slots: Ids) -> None:
        self._map.full_to_window[pages] = slots
        self._map.begins[pages] = 0

    def attach_at(self, pin: Pin, slot: int, owner: int) -> bool:
        return False

    def free_lent(self, pages: Ids, owner: int) -> None:
        self.in_tree.slots.return_ids(self._map.detach(pages), owner)

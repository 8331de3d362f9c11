"""Sliding windows: pages of their own, found through the full page of the same tokens (C5, C18).

A window page belongs to whoever holds its full page, and goes before it: a request gives it back when the window has
moved past it, the prefix cache when somebody needs it more. `full_to_window[page]` 0 says that it is not there. A hit
needs one contiguous window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from forebay.config.engine_config import Ledger
from forebay.memory.kinds.kind import Kind
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node
from forebay.memory.slots import CACHE, PAD, Holder, Ids, Slots

_NOTHING: Final[Ids] = np.empty(0, dtype=np.int64)


class Windows(Kind):
    """`num_window_pages` pages for the `num_pages` full pages, and which is whose.

    `locks[page]` counts the requests that still read a cached page's window. The device's copy of `full_to_window`
    learns of changes through the window page writes of a step's plan; entries that became 0 are not sent: nobody reads
    them before they are written again.
    """

    name: ClassVar[str] = "window"
    missing: ClassVar[MissReason] = MissReason.WINDOW_MISSING

    def __init__(
        self,
        num_window_pages: int,
        num_pages: int,
        *,
        page_size: int,
        window: int,
        margin: int = 0,
        ledger: Ledger = Ledger.RAISE,
    ) -> None:
        self.slots = Slots("window", num_window_pages, ledger=ledger)
        self.page_size, self.window, self.margin = page_size, window, margin
        self.full_to_window: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self.locks: npt.NDArray[np.int32] = np.zeros(num_pages + 1, dtype=np.int32)
        self._written: list[Ids] = []
        # Those that may have windows, the least recently used first.
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def first_needed(self, kv_len: int) -> int:
        """Index of the first page that the query at position `kv_len` reads, or any query after it."""
        return max(0, kv_len - self.window + 1) // self.page_size

    def first_kept(self, kv_len: int | Ids) -> Ids:
        """Index of the first page whose window a request with `kv_len` tokens goes on holding."""
        first: Ids = np.maximum(np.asarray(kv_len) - self.window - self.margin + 1, 0) // self.page_size
        return first

    def is_there(self, pages: Ids) -> npt.NDArray[np.bool_]:
        there: npt.NDArray[np.bool_] = self.full_to_window[pages] != PAD
        return there

    # -- pages of requests --------------------------------------------------------------------------------------------

    def take(self, pages: Ids, owner: int | Ids) -> None:
        """A window page for each of `pages`, which have none. Raises OutOfSlots and takes none when short."""
        self.make_room(len(pages))
        self.full_to_window[pages] = self.slots.take_ids(len(pages), owner)
        self._written.append(pages)

    def detach(self, pages: Ids) -> Ids:
        """Take those window pages of `pages` that are there away from them; they are the caller's to return."""
        windows = self.full_to_window[pages]
        self.full_to_window[pages] = PAD
        ids: Ids = windows[windows != PAD].astype(np.int64)
        return ids

    def take_writes(self) -> tuple[Ids, Ids]:
        """Pages whose window page changed since the last plan, each once, and what it is now."""
        written, self._written = self._written, []
        if not written:
            return _NOTHING, _NOTHING
        pages = written[0] if len(written) == 1 else np.unique(np.concatenate(written))
        return pages, self.full_to_window[pages].astype(np.int64)

    def write_again(self, pages: Ids) -> None:
        """Tell the device once more: the step that carried it may never have run."""
        self._written.append(np.unique(pages))

    # -- pages of the prefix cache ------------------------------------------------------------------------------------

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        gaps = np.flatnonzero(~self.is_there(pages[:longest]))
        n = longest
        while n > 0:
            below = int(np.searchsorted(gaps, n))  # gaps[:below] are in front of page n
            if below == 0 or gaps[below - 1] < self.first_needed(n * self.page_size):
                return n
            n = int(gaps[below - 1])  # a gap in the window: the next place that could do ends in front of it
        return 0

    def lock(self, pages: Ids) -> None:
        """Keep the windows of cached pages, which are there, from eviction."""
        self.num_locked += int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += 1

    def unlock(self, pages: Ids) -> None:
        self.locks[pages] -= 1
        left = self.locks[pages]
        assert (left >= 0).all(), f"windows of pages {pages} were unlocked more often than locked"
        self.num_locked -= int(np.count_nonzero(left == 0))

    def evict(self, num_slots: int) -> int:
        """Of a node the first pages go first: whoever resumes at its end needs only the last ones."""
        missing, emptied = num_slots, []
        for node in self._nodes:
            if missing <= 0:
                break
            missing -= self.evict_from(node.pages, missing)
            if not self.is_there(node.pages).any():
                emptied.append(node)
        for node in emptied:
            del self._nodes[node]
        if missing < num_slots:
            self.tree.lost(())
        return num_slots - missing

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
            self._nodes[step] = None
            self._nodes.move_to_end(step)
            num_pages -= len(step.pages)
            step = step.parent

    def attached(self, node: Node, owner: int) -> None:
        self.give_to_cache(node.pages, owner)
        self._nodes[node] = None

    def replaced(self, nodes: Sequence[Node], cached: Ids, own: Ids, owner: int) -> None:
        """The cache takes over the windows that it had lost."""
        lost = (self.full_to_window[cached] == PAD) & (self.full_to_window[own] != PAD)
        own, cached = own[lost], cached[lost]
        if len(own):
            self.full_to_window[cached] = self.full_to_window[own]
            self.full_to_window[own] = PAD
            self._written.append(cached)
            self.give_to_cache(cached, owner)
        for node in nodes:
            self._nodes[node] = None

    def give_to_cache(self, pages: Ids, owner: int) -> None:
        """The cache adopts `pages`, and with them the window pages that are there."""
        windows = self.full_to_window[pages]
        ids = windows[windows != PAD].astype(np.int64)
        self.slots.transfer(ids, owner, CACHE)
        self.num_cached += len(ids)

    def split(self, upper: Node, lower: Node) -> None:
        """The upper part stands first: whoever resumes further down needs it less."""
        self._nodes[upper] = None
        self._nodes.move_to_end(upper, last=False)

    def removed(self, node: Node) -> None:
        self.evict_from(node.pages, len(node.pages))
        self._nodes.pop(node, None)

    def clear(self) -> None:
        """No page has a window, and every one is free."""
        self.slots.clear()
        self.full_to_window[:] = PAD
        self.locks[:] = 0
        self.num_cached = self.num_locked = 0
        self._written = []
        self._nodes.clear()

    # -- checking -----------------------------------------------------------------------------------------------------

    def cached(self, nodes: Iterable[Node]) -> Holder:
        windows = np.concatenate([_NOTHING, *(self.full_to_window[node.pages] for node in nodes)])
        return Holder(CACHE, windows[windows != PAD].astype(np.int64))

"""The sliding-window pages that the prefix cache keeps: one contiguous window is what a hit needs (C18)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from forebay.memory.radix_node import Node
from forebay.memory.slots import CACHE, Holder, Ids
from forebay.memory.window_pool import WindowPool


class CachedWindows:
    """The nodes that may have windows, the least recently used first. Of a node the first pages go first: whoever
    resumes at its end needs only the last ones."""

    def __init__(self, pool: WindowPool) -> None:
        self.pool = pool
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def last_resumable(self, pages: Ids, longest: int) -> int:
        """The greatest number of pages, at most `longest`, after which the whole window before is there. `pages` are
        those of a prefix, from its start."""
        pool, ps = self.pool, self.pool.page_size
        gaps = np.flatnonzero(~pool.is_there(pages[:longest]))
        n = longest
        while n > 0:
            below = int(np.searchsorted(gaps, n))  # gaps[:below] are in front of page n
            if below == 0 or gaps[below - 1] < pool.first_needed(n * ps):
                return n
            n = int(gaps[below - 1])  # a gap in the window: the next place that could do ends in front of it
        return 0

    def touch(self, node: Node, num_pages: int) -> None:
        """Somebody goes on from the end of `node`, `num_pages` pages from the root."""
        first = self.pool.first_needed(num_pages * self.pool.page_size)
        step: Node | None = node
        while step is not None and step.parent is not None and num_pages > first:
            self._nodes[step] = None
            self._nodes.move_to_end(step)
            num_pages -= len(step.pages)
            step = step.parent

    def evict(self, num_windows: int) -> int:
        """Free `num_windows` unlocked windows, or all there are; how many."""
        missing, emptied = num_windows, []
        for node in self._nodes:
            if missing <= 0:
                break
            missing -= self.pool.evict(node.pages, missing)
            if not self.pool.is_there(node.pages).any():
                emptied.append(node)
        for node in emptied:
            del self._nodes[node]
        return num_windows - missing

    def clear(self) -> None:
        """Forget every node; the windows are not returned."""
        self._nodes.clear()

    # -- what the tree tells --------------------------------------------------------------------------------------

    def attached(self, node: Node, owner: int) -> None:
        self.pool.give_to_cache(node.pages, owner)
        self._nodes[node] = None

    def replaced(self, node: Node) -> None:
        """A request's windows may have come to a node that had lost its own."""
        self._nodes[node] = None

    def split(self, upper: Node, lower: Node) -> None:
        """The upper part stands first: whoever resumes further down needs it less."""
        self._nodes[upper] = None
        self._nodes.move_to_end(upper, last=False)

    def removed(self, node: Node) -> None:
        self.pool.evict(node.pages, len(node.pages))
        self._nodes.pop(node, None)

    # -- checking -------------------------------------------------------------------------------------------------

    def holder(self, nodes: Iterator[Node]) -> Holder:
        ids = [self.pool.full_to_window[node.pages] for node in nodes]
        windows = np.concatenate(ids) if ids else np.empty(0, dtype=np.int32)
        return Holder(CACHE, windows[windows != 0].astype(np.int64))

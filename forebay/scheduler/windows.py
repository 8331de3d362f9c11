"""The window pages that admitted requests hold: taken as tokens come, given back as the window moves on."""

from __future__ import annotations

from forebay.base.units import ceil_div
from forebay.memory.holding import Residency, RowTable
from forebay.memory.kinds.window import Windows
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import Ids


class WindowKeeper:
    """A request holds the windows of its pages from `window_start` on: those of its pinned pages are locked, the others
    are its own. There are always enough: what all rows can need at once is reserved when memory is divided.

    The window moves with what completed steps have written. So no step in flight reads what it moves past, which can
    be given back at once; and what a step in flight writes has its whole window when the cache adopts it.
    """

    def __init__(self, pool: Windows, rows: ReqToTokenPool) -> None:
        self.pool = pool
        self._rows = rows
        self._page_size = pool.page_size

    def lock(self, pages: Ids) -> None:
        """Lock the last windows of a cached prefix's pages, from whose end somebody will go on."""
        self.pool.lock(pages[self.pool.first_needed(len(pages) * self._page_size) :])

    def unlock(self, pages: Ids) -> None:
        """Take back a `lock` of these pages."""
        self.pool.unlock(pages[self.pool.first_needed(len(pages) * self._page_size) :])

    def extend(self, held: Residency, stop: int) -> None:
        """A step computes the request's tokens up to `stop`."""
        first, last = ceil_div(held.kv_len, self._page_size), ceil_div(stop, self._page_size)
        if first < last:
            self.pool.take(self._rows.pages(held.row, first, last), held.id)

    def decode(self, table: RowTable, rows: Ids) -> None:
        """A step will decode these rows: the window of each may have moved on."""
        moved = self.pool.first_kept(table.kv_committed[rows]) > table.window_start[rows]
        for row in rows[moved].tolist():
            self.slide(table.resident(row))

    def slide(self, held: Residency) -> None:
        """Give back what lies behind the window of the request's last completed token."""
        first = int(self.pool.first_kept(held.kv_committed))
        start = held.window_start
        if first > start:
            own, unlocked = self.leave(held, start, first)
            self.pool.slots.return_ids(own, held.id)
            self.pool.unlock(unlocked)
            held.window_start = first

    def leave(self, held: Residency, start: int, stop: int) -> tuple[Ids, Ids]:
        """Detach the windows of its own pages in [start, stop); they, and the pinned pages there, to be unlocked."""
        pages = self._rows.pages(held.row, start, stop)
        num_pinned = min(max(held.pin.num_pages - start, 0), len(pages))
        return self.pool.detach(pages[num_pinned:]), pages[:num_pinned]

    def adopted(self, held: Residency, start: int, stop: int) -> None:
        """The cache has adopted the request's pages [start, stop): the request goes on reading the last of them."""
        first = max(start, held.window_start)
        if first < stop:
            self.pool.lock(self._rows.pages(held.row, first, stop))

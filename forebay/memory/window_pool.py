"""Pages of sliding-window layers, found through the full page of the same tokens (C5).

A window page belongs to whoever holds its full page, and goes before it: a request gives it back when the window has
moved past it, the prefix cache when somebody needs it more. `full_to_window[page]` 0 says that it is not there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forebay.config.engine_config import Ledger
from forebay.memory.slots import CACHE, PAD, Ids, Slots

_NOTHING = np.empty(0, dtype=np.int64)


class WindowPool:
    """`num_window_pages` pages for the `num_pages` full pages, and which is whose.

    `locks[page]` counts the requests that still read a cached page's window. The device's copy of `full_to_window`
    learns of changes through the window page writes of a step's plan; entries that became 0 are not sent: nobody reads
    them before they are written again.
    """

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
        self.num_cached = 0
        self.num_locked = 0  # cached ones that a request still reads
        self._written: list[Ids] = []

    @property
    def num_evictable(self) -> int:
        return self.num_cached - self.num_locked

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
        self.full_to_window[pages] = self.slots.take_ids(len(pages), owner)
        self._written.append(pages)

    def detach(self, pages: Ids) -> Ids:
        """Take those window pages of `pages` that are there away from them; they are the caller's to return."""
        windows = self.full_to_window[pages]
        self.full_to_window[pages] = PAD
        ids: Ids = windows[windows != PAD].astype(np.int64)
        return ids

    # -- pages of the prefix cache ------------------------------------------------------------------------------------

    def give_to_cache(self, pages: Ids, owner: int) -> None:
        """The cache adopts `pages`, and with them the window pages that are there."""
        windows = self.full_to_window[pages]
        ids = windows[windows != PAD].astype(np.int64)
        self.slots.transfer(ids, owner, CACHE)
        self.num_cached += len(ids)

    def replace(self, own: Ids, cached: Ids, owner: int) -> None:
        """The cache has `cached` where a request has `own`: it takes over the windows that it had lost."""
        lost = (self.full_to_window[cached] == PAD) & (self.full_to_window[own] != PAD)
        own, cached = own[lost], cached[lost]
        if len(own):
            self.full_to_window[cached] = self.full_to_window[own]
            self.full_to_window[own] = PAD
            self._written.append(cached)
            self.give_to_cache(cached, owner)

    def lock(self, pages: Ids) -> None:
        """Keep the windows of cached pages, which are there, from eviction."""
        self.num_locked += int(np.count_nonzero(self.locks[pages] == 0))
        self.locks[pages] += 1

    def unlock(self, pages: Ids) -> None:
        self.locks[pages] -= 1
        left = self.locks[pages]
        assert (left >= 0).all(), f"windows of pages {pages} were unlocked more often than locked"
        self.num_locked -= int(np.count_nonzero(left == 0))

    def evict(self, pages: Ids, most: int) -> int:
        """Free up to `most` unlocked windows of cached pages, the first ones; how many."""
        ids = self.detach(pages[self.is_there(pages) & (self.locks[pages] == 0)][:most])
        self.num_cached -= len(ids)
        self.slots.return_ids(ids, CACHE)
        return len(ids)

    def take_writes(self) -> tuple[Ids, Ids]:
        """Pages whose window page changed since the last plan, each once, and what it is now."""
        written, self._written = self._written, []
        if not written:
            return _NOTHING, _NOTHING
        pages = written[0] if len(written) == 1 else np.unique(np.concatenate(written))
        return pages, self.full_to_window[pages].astype(np.int64)

    def clear(self) -> None:
        """No page has a window, and every one is free."""
        self.slots.clear()
        self.full_to_window[:] = PAD
        self.locks[:] = 0
        self.num_cached = self.num_locked = 0
        self._written = []

    def write_again(self, pages: Ids) -> None:
        """Tell the device once more: the step that carried it may never have run."""
        self._written.append(np.unique(pages))

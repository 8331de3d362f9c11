"""KV pages: which page holds which tokens (C5). Pages are ids here; their bytes live in `pools.cache_pool`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forebay.config.engine_config import Ledger
from forebay.memory.slots import Ids, Slots


class PagedKvAllocator(Slots):
    """`num_pages` pages of `page_size` tokens; page 0 is the padding page and is never handed out.

    The location of a token is `page * page_size + offset`, so locations below `page_size` are nobody's.
    """

    def __init__(self, num_pages: int, page_size: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        super().__init__("kv", num_pages, ledger=ledger)
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        return self.capacity


def extend_locations(pages: npt.NDArray[np.int32] | Ids, start: int, stop: int, page_size: int) -> Ids:
    """Locations of the tokens at positions [start, stop) of a request whose pages are `pages` (from position 0)."""
    positions = np.arange(start, stop, dtype=np.int64)
    if page_size == 1:
        return pages[start:stop].astype(np.int64)
    page, offset = np.divmod(positions, page_size)
    locations: Ids = pages[page].astype(np.int64) * page_size + offset
    return locations


def decode_locations(req_to_token: npt.NDArray[np.int32], rows: Ids, positions: Ids, page_size: int) -> Ids:
    """Location of one token per row, at `positions` [b]."""
    if page_size == 1:
        return req_to_token[rows, positions].astype(np.int64)
    page, offset = np.divmod(positions, page_size)
    locations: Ids = req_to_token[rows, page].astype(np.int64) * page_size + offset
    return locations

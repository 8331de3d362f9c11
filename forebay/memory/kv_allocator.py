"""KV pages: which page holds which tokens (C5). Pages are ids here; their bytes live in `pools.cache_pool`."""

from __future__ import annotations

from typing import Final

from forebay.config.engine_config import Ledger
from forebay.memory.slots import Slots

KV: Final = "kv"  # the name of full KV among the kinds of cache


class PagedKvAllocator(Slots):
    """`num_pages` pages of `page_size` tokens; page 0 is the padding page and is never allocated. The location of a
    token is `page * page_size + offset`, so locations below `page_size` are padding."""

    def __init__(self, num_pages: int, page_size: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        super().__init__(KV, num_pages, ledger=ledger)
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        return self.capacity

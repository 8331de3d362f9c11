"""What the device has to be told of request rows: changes of `req_to_token`, until a plan takes them along."""

from __future__ import annotations

import numpy as np

from forebay.memory.holding import NOTHING
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import Ids

RowWrites = tuple[Ids, Ids, Ids]
"""Rows, columns and pages."""


class RowWriter:
    """Writes rows of the host's table and remembers it."""

    def __init__(self, rows: ReqToTokenPool) -> None:
        self._rows = rows
        self._writes: list[RowWrites] = []

    def write(self, row: int, start: int, pages: Ids) -> None:
        """`pages` from page number `start` on."""
        self._rows.write(row, start, pages)
        columns = np.arange(start, start + len(pages), dtype=np.int64)
        self._writes.append((np.full(len(pages), row, dtype=np.int64), columns, pages))

    def write_each(self, rows: Ids, columns: Ids, pages: Ids) -> None:
        """One page for each of different rows."""
        self._rows.req_to_token[rows, columns] = pages
        self._writes.append((rows, columns, pages))

    def forget(self, row: int) -> None:
        """Nobody reads this row before its next tenant writes it, and which of two writes to one entry in the same step
        wins is undefined on a device."""
        self._writes = [write for write in self._writes if write[0][0] != row]

    def take(self) -> RowWrites:
        """What changed since the last plan, in order."""
        writes, self._writes = self._writes, []
        if not writes:
            return NOTHING, NOTHING, NOTHING
        if len(writes) == 1:
            return writes[0]
        rows, columns, pages = (np.concatenate(part) for part in zip(*writes, strict=True))
        return rows, columns, pages

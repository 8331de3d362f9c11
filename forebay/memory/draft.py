"""The changes of memory that the next step makes, recorded as they are decided."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from forebay.memory.holding import Holding
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import NO_IDS, Ids

RowWrites = tuple[Ids, Ids, Ids]
"""Rows, columns and pages."""


@dataclass(eq=False)
class Draft:
    """The changes of the step that will be launched next, `step`: the host's tables change at once, and the
    device's updates are collected here until the plan is made.

    There is always one. What commits and releases change between two plans belongs to the next step, too.
    """

    step: int
    rows: ReqToTokenPool
    _row_writes: list[RowWrites] = field(default_factory=list, init=False)
    _remapped: list[Ids] = field(default_factory=list, init=False)
    clears: list[int] = field(default_factory=list, init=False)  # slots that the step begins by making zeros
    copies: list[tuple[int, int]] = field(default_factory=list, init=False)  # slots that it begins by copying: from, to
    # Row, KV length, and a slot for what the step leaves there.
    copies_at: list[tuple[int, int, int]] = field(default_factory=list, init=False)
    num_drafts: Ids | None = field(default=None, init=False)  # draft tokens of each decode, where any has some
    reads: list[Holding] = field(default_factory=list, init=False)  # what it reads: released when it has committed

    def write_row(self, row: int, start: int, pages: Ids) -> None:
        """The row has `pages` from page number `start` on."""
        self.rows.req_to_token[row, start : start + len(pages)] = pages
        columns = np.arange(start, start + len(pages), dtype=np.int64)
        self._row_writes.append((np.full(len(pages), row, dtype=np.int64), columns, pages))

    def write_each(self, rows: Ids, columns: Ids, pages: Ids) -> None:
        """Different rows have one page more each."""
        self.rows.req_to_token[rows, columns] = pages
        self._row_writes.append((rows, columns, pages))

    def forget_row(self, row: int) -> None:
        """Drop the writes to a row. No step reads it before its next request writes it, and the order of two writes to
        one entry in the same step is undefined on a device."""
        self._row_writes = [write for write in self._row_writes if write[0][0] != row]

    @property
    def row_writes(self) -> RowWrites:
        """Return the row writes, in order."""
        if len(self._row_writes) == 1:
            return self._row_writes[0]
        if not self._row_writes:
            return NO_IDS, NO_IDS, NO_IDS
        rows, columns, pages = (np.concatenate(part) for part in zip(*self._row_writes, strict=True))
        return rows, columns, pages

    def remap(self, pages: Ids) -> None:
        """Record that the slots mapped to these pages have changed."""
        self._remapped.append(pages)

    @property
    def remapped(self) -> Ids:
        """Each page once."""
        if len(self._remapped) == 1:
            return self._remapped[0]
        return np.unique(np.concatenate(self._remapped)) if self._remapped else NO_IDS

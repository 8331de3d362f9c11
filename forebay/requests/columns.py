"""Per-request columns on the host, declared once: every operation that reorders a batch is derived from them (C9)."""

from __future__ import annotations

from typing import ClassVar, Self, overload

import numpy as np

from forebay.memory.slots import Ids


class OutrunError(Exception):
    """A host value that a launched step may have changed was read before that step committed (C12)."""


class HostColumn:
    """One int64 value per request. Reading it gives a view `[b]` of the batch's block, writing it copies in."""

    def __init__(self) -> None:
        self.name = ""
        self.index = -1

    def __set_name__(self, owner: type[HostColumns], name: str) -> None:
        self.name = name
        self.index = len(owner.declared)
        owner.declared = (*owner.declared, self)

    @overload
    def __get__(self, batch: None, owner: type[HostColumns]) -> Self: ...
    @overload
    def __get__(self, batch: HostColumns, owner: type[HostColumns]) -> Ids: ...
    def __get__(self, batch: HostColumns | None, owner: type[HostColumns]) -> Self | Ids:
        if batch is None:
            return self
        if self.index in batch._outrun:
            raise OutrunError(f"{self.name}: a launched step decides it; wait for its commit, or ask for a bound")
        return batch._block[self.index, : batch._len]

    def __set__(self, batch: HostColumns, values: Ids) -> None:
        batch._block[self.index, : batch._len] = values


class HostColumns:
    """A growable block `[columns, capacity]` of int64, of which the first `len(self)` entries are live."""

    declared: ClassVar[tuple[HostColumn, ...]] = ()

    def __init__(self, capacity: int = 8) -> None:
        self._block = np.zeros((len(self.declared), capacity), dtype=np.int64)
        self._len = 0
        self._outrun: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self._len

    def resize(self, n: int) -> None:
        """Make room for n entries; new ones are undefined until every column was written."""
        capacity = self._block.shape[1]
        if n > capacity:
            block = np.zeros((len(self.declared), max(n, 2 * capacity)), dtype=np.int64)
            block[:, : self._len] = self._block[:, : self._len]
            self._block = block
        self._len = n

    def keep(self, indices: Ids) -> None:
        """Keep the entries at `indices`, in that order."""
        kept = len(indices)
        self._block[:, :kept] = self._block.take(indices, axis=1)
        self._len = kept

    def append(self, other: Self) -> None:
        n, more = self._len, other._len
        self._outrun |= other._outrun
        self.resize(n + more)
        self._block[:, n : n + more] = other._block[:, :more]

    # -- values the device decides (C12) --------------------------------------------------------------------------

    def mark_outrun(self, column: HostColumn) -> None:
        """From now on the device knows `column` better than the host: reading it is an error until `settle`."""
        self._outrun |= {column.index}

    def settle(self, column: HostColumn, values: Ids) -> None:
        """The step committed: these are the values."""
        self._outrun -= {column.index}
        column.__set__(self, values)

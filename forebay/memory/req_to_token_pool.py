"""Request rows: the indirection from a request to its KV pages (C1, C2). The host table is the truth; the device's copy
of it (`pools.request_rows`) learns of changes through the row writes of a step's plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forebay.base.units import ceil_div
from forebay.config.engine_config import Ledger
from forebay.memory.slots import NO_SLOT, PAD, Holder, Ids, OutOfSlots, Slots

_HELD = 1  # who runs in a row is `RowTable`'s to know; the ledger only has to know that it is held


class RowHolder(Protocol):
    """An object with a request id that can hold a row of `req_to_token`."""

    id: int
    row: int  # NO_SLOT when it holds none


class ReqToTokenPool:
    """`size` request rows; `req_to_token` is int32 `[size + 1, ceil(max_context_len / page_size)]`, one entry per page.

    Row 0 is the padding row: never handed out, all zero at all times. `generation[row]` grows each time the row is
    handed out and is never reset.
    """

    def __init__(self, size: int, max_context_len: int, *, page_size: int = 1, ledger: Ledger = Ledger.RAISE) -> None:
        self.size, self.max_context_len, self.page_size = size, max_context_len, page_size
        self.slots = Slots("rows", self._num_slots(), ledger=ledger)
        self.req_to_token: npt.NDArray[np.int32] = np.zeros(
            (self.slots.num_rows, ceil_div(max_context_len, page_size)), dtype=np.int32
        )

    def _num_slots(self) -> int:
        return self.size

    @property
    def generation(self) -> Ids:
        return self.slots.generation

    def available_size(self) -> int:
        return self.slots.num_free

    def alloc(self, reqs: Sequence[RowHolder]) -> list[int]:
        """Rows of `reqs` in their order. A request that already holds a row (the next chunk of a prompt) keeps it.

        Raises OutOfSlots, with nothing changed, when there are too few for all.
        """
        new = [req for req in reqs if req.row == NO_SLOT]
        if len(new) == 1:
            rows = [self.slots.take_one(_HELD)]
        else:
            rows = self.slots.take_ids(len(new), _HELD).tolist()
        for req, row in zip(new, rows, strict=True):
            req.row = row
        return rows if len(new) == len(reqs) else [req.row for req in reqs]

    @contextmanager
    def group(self, n: int) -> Iterator[None]:
        """One allocation group for n admissions (C7)."""
        with self.slots.group(n):
            yield

    def free(self, req: RowHolder) -> None:
        """Take the row back from a request that holds one."""
        row, req.row = req.row, NO_SLOT
        self.free_row(row)

    def free_row(self, row: int) -> None:
        """Return a row to the pool, after its request has released it."""
        self.slots.return_ids(np.array([row], dtype=np.int64), _HELD)
        if row != NO_SLOT:
            self.req_to_token[row] = 0

    def pages(self, row: int, start: int, stop: int) -> Ids:
        """A copy of the row's pages [start, stop)."""
        return self.req_to_token[row, start:stop].astype(np.int64)

    def locations(self, rows: Ids, positions: Ids) -> Ids:
        """Where the KV of tokens goes, at `positions` [T] of `rows` [T]: page * page_size + offset."""
        page, offset = (positions, 0) if self.page_size == 1 else np.divmod(positions, self.page_size)
        locations: Ids = self.req_to_token[rows, page].astype(np.int64) * self.page_size + offset
        return locations

    def claim(self, rows: Ids) -> None:
        """Take these rows, which are free, for another engine that may still write them."""
        self.slots.claim(rows, _HELD)

    def clear(self) -> None:
        """Free and zero every row; generations continue."""
        self.slots.clear()
        self.req_to_token[:] = 0

    def audit(self, rows: Sequence[int]) -> None:
        """Raise LedgerError unless exactly `rows` are held and the padding row is zero."""
        self.slots.audit([Holder(_HELD, np.array(sorted(rows), dtype=np.int64))])
        assert not self.req_to_token[PAD].any(), "the padding row of req_to_token was written"


class DecodeReqToTokenPool(ReqToTokenPool):
    """Rows of a decode server: `size` for running requests and `pre_alloc_size` more, so that the KV of future requests
    can arrive while the batch is full. Admission limits the number of running requests."""

    def __init__(self, size: int, max_context_len: int, *, pre_alloc_size: int, **others: Any) -> None:
        self.pre_alloc_size = pre_alloc_size
        super().__init__(size, max_context_len, **others)

    def _num_slots(self) -> int:
        return self.size + self.pre_alloc_size

    def alloc_running(self, reqs: Sequence[RowHolder], num_running: int) -> list[int]:
        """Rows for requests that start to run now, `num_running` others already do; never more than `size` run."""
        if num_running + len(reqs) > self.size:
            raise OutOfSlots("running rows", len(reqs), self.size - num_running)
        return self.alloc(reqs)

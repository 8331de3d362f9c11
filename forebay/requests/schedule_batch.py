"""A batch of requests: an array of rows into what the host knows of them. The host's columns are the truth; the device
gets copies (C9, C10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from forebay.memory.holding import RowTable
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.request import Request


class Chunk(NamedTuple):
    """A step computes a request's known tokens from position `start` up to `stop`."""

    req: Request
    start: int
    stop: int


@dataclass(eq=False)
class ScheduleBatch:
    """`reqs` and their rows `req_pool_indices_cpu`, entry for entry; all other values of a row are in the table.
    Columns are int64 `[b]`; lengths are in tokens."""

    _table: RowTable
    reqs: list[Request] = field(default_factory=list, init=False)
    req_pool_indices_cpu: Ids = field(default_factory=lambda: NO_IDS, init=False)

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def seq_lens_cpu(self) -> Ids:
        """A copy of the lengths of KV, with what the prepared step adds. Raises Outrun where only the device knows."""
        return self._table.kv_lens(self.req_pool_indices_cpu)

    @property
    def tokens_left(self) -> Ids:
        """By how much each row may still grow for certain: a row with 0 is not launched again."""
        rows = self.req_pool_indices_cpu
        left: Ids = self._table.max_kv_len[rows] - self._table.kv_bound[rows]
        return left

    def prepare_for_extend(self, chunks: Sequence[Chunk]) -> None:
        """The batch becomes the requests of these chunks, with KV up to their ends."""
        self.reqs = [chunk.req for chunk in chunks]
        self.req_pool_indices_cpu = np.array([req.allocation.row for req in self.reqs], dtype=np.int64)
        self._table.kv_bound[self.req_pool_indices_cpu] = [chunk.stop for chunk in chunks]

    def prepare_for_decode(self, active: Ids | None = None) -> None:
        """Each request (or those at the indices `active`) computes one token more."""
        rows = self.req_pool_indices_cpu
        self._table.kv_bound[rows if active is None else rows[active]] += 1

    def prepare_for_idle(self) -> None:
        """The batch becomes empty: a rank without work still takes its part in a step (C9, for parallel ranks)."""
        self.prepare_for_extend([])

    def prepare_for_prebuilt(self, reqs: Sequence[Request]) -> None:
        """The batch becomes requests whose KV came from elsewhere: every token but the last has it, and the next step
        decodes (C9, for the decode server)."""
        self.prepare_for_extend([Chunk(req, 0, len(req.tokens) - 1) for req in reqs])

    def filter_batch(self, keep: Ids) -> None:
        """Keep the requests at the indices `keep`, in that order."""
        reqs = self.reqs
        self.reqs = [reqs[i] for i in keep.tolist()]
        self.req_pool_indices_cpu = self.req_pool_indices_cpu[keep]

    def remove(self, req: Request) -> None:
        """Remove one request from the batch; its row stays allocated."""
        self.filter_batch(np.flatnonzero(self.req_pool_indices_cpu != req.allocation.row))

    def merge_batch(self, other: Self) -> None:
        """Append another batch's requests."""
        self.reqs += other.reqs
        self.req_pool_indices_cpu = np.concatenate([self.req_pool_indices_cpu, other.req_pool_indices_cpu])

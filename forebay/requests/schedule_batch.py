"""A batch of requests as columns on the host. The host's columns are the truth; the device gets copies (C9, C10)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Self

import numpy as np

from forebay.memory.slots import Ids
from forebay.requests.columns import HostColumn, HostColumns
from forebay.requests.request import Request


class ForwardMode(Enum):
    IDLE = "idle"
    EXTEND = "extend"
    DECODE = "decode"


class ScheduleBatch(HostColumns):
    """`reqs` and their columns, entry for entry. Columns are int64 `[b]`; lengths are in tokens.

    After a `prepare_for_*`, the step computes the tokens at positions [prefix_lens_cpu, seq_lens_cpu) of each request.
    """

    req_pool_indices_cpu = HostColumn()
    prefix_lens_cpu = HostColumn()  # KV before the step
    seq_lens_cpu = HostColumn()  # KV after the step
    max_kv_lens_cpu = HostColumn()  # KV at which the request ends for certain: at this length nothing more is launched
    request_ids_cpu = HostColumn()
    window_starts_cpu = HostColumn()  # pages: the first whose window is held

    def __init__(self, capacity: int = 8) -> None:
        super().__init__(capacity)
        self.reqs: list[Request] = []
        self.forward_mode = ForwardMode.IDLE

    @property
    def is_empty(self) -> bool:
        return not self.reqs

    def prepare_for_extend(self, reqs: Sequence[Request], stops: Sequence[int]) -> None:
        """The batch becomes: compute each request's known tokens from what it has KV for up to `stops`."""
        self._fill(reqs)
        self.prefix_lens_cpu = np.array([req.kv_len for req in reqs], dtype=np.int64)
        self.seq_lens_cpu = np.array(stops, dtype=np.int64)
        self.forward_mode = ForwardMode.EXTEND

    def prepare_for_decode(self, active: Ids | None = None) -> None:
        """Each request (or those at the indices `active`) computes one token more."""
        seq_lens = self.seq_lens_cpu
        self.prefix_lens_cpu = seq_lens
        if active is None:
            seq_lens += 1
        else:
            seq_lens[active] += 1
        self.forward_mode = ForwardMode.DECODE

    def prepare_for_idle(self) -> None:
        """The batch becomes empty: a rank without work still takes its part in a step."""
        self._fill([])
        self.forward_mode = ForwardMode.IDLE

    def prepare_for_prebuilt(self, reqs: Sequence[Request]) -> None:
        """The batch becomes requests whose KV came from elsewhere (a prefill server): every token but the last has it,
        and the next step decodes."""
        self._fill(reqs)
        self.seq_lens_cpu = np.array([len(req.tokens) - 1 for req in reqs], dtype=np.int64)
        self.prefix_lens_cpu = self.seq_lens_cpu
        self.forward_mode = ForwardMode.DECODE

    def filter_batch(self, keep: Ids) -> None:
        """Keep the requests at the indices `keep`, in that order."""
        reqs = self.reqs
        self.reqs = [reqs[i] for i in keep.tolist()]
        self.keep(keep)
        if not self.reqs:
            self.forward_mode = ForwardMode.IDLE

    def merge_batch(self, other: Self) -> None:
        """Append another batch's requests."""
        self.append(other)
        self.reqs += other.reqs
        if other.reqs:
            self.forward_mode = other.forward_mode

    def index_of(self, req: Request) -> int:
        return self.reqs.index(req)

    def _fill(self, reqs: Sequence[Request]) -> None:
        self.reqs = list(reqs)
        self.resize(len(reqs))
        self.req_pool_indices_cpu = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
        self.max_kv_lens_cpu = np.array([req.max_kv_len for req in reqs], dtype=np.int64)
        self.request_ids_cpu = np.array([req.id for req in reqs], dtype=np.int64)
        self.window_starts_cpu = np.array([req.window_start for req in reqs], dtype=np.int64)

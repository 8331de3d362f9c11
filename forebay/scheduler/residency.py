"""Everything that admitted requests hold: rows, pages and pins; how they come by it, and when it is given back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from forebay.base import fault
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.footprint import footprint
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_cache import Match, Pin, RadixCache
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import PAD, Holder, Ids
from forebay.requests.request import Request, Status
from forebay.requests.schedule_batch import ScheduleBatch

RowWrites = tuple[Ids, Ids, Ids]
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What a request let go of while steps that may still write to it were in flight."""

    after_step: int
    request_id: int
    row: int  # PAD when it kept its row
    pages: Ids
    pin: Pin | None

    @property
    def num_pages(self) -> int:
        """Pages that become available when this is released, at most."""
        return len(self.pages) + (self.pin.num_pages if self.pin else 0)


class Residencies:
    """Rows, KV pages and prefix cache of one engine.

    A request holds its row, its first `pin.num_pages` pages through the cache, and the rest itself. What a step in
    flight may still write is not released: it waits for the commit of the last step launched before it was let go.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.rows = ReqToTokenPool(
            config.max_running_requests, config.context_length, page_size=config.page_size, ledger=config.ledger
        )
        self.kv = PagedKvAllocator(config.num_pages, config.page_size, ledger=config.ledger)
        self.cache = RadixCache(self.kv, config.page_size, policy=config.radix_eviction_policy)
        self._reuse = config.radix_cache
        self._leaving: deque[_Leaving] = deque()
        self._writes: list[RowWrites] = []
        self.last_launched = 0
        self.last_committed = 0

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free, or cached and not pinned."""
        return self.kv.num_free + self.cache.num_evictable

    @property
    def leaving_pages(self) -> int:
        """Pages that will be available when the steps in flight have committed."""
        return sum(leaving.num_pages for leaving in self._leaving)

    # -- coming in ------------------------------------------------------------------------------------------------

    def match(self, req: Request) -> Match:
        """What the cache has of the request's tokens; the last one is always computed, so it is never asked for."""
        if not self._reuse:
            return self.cache.match(b"", req.namespace)._replace(reason=MissReason.DISABLED)
        if req.wants_prompt_logprobs:
            return self.cache.match(b"", req.namespace)._replace(reason=MissReason.PROMPT_LOGPROBS)
        return self.cache.match(req.key(len(req.tokens) - 1), req.namespace)

    def pin(self, req: Request, match: Match) -> Pin:
        return self.cache.pin(match, req.namespace, req.priority)

    def pages_to_admit(self, req: Request, pin: Pin) -> int:
        return footprint(len(req.tokens), self.page_size, held_pages=pin.num_pages).pages

    def admit(self, req: Request, match: Match, pin: Pin) -> None:
        """Give the request a row and pages for all its known tokens, all or nothing; the pin becomes the request's.

        The caller has checked that there is enough: OutOfSlots here is a fault of ours.
        """
        need = self.pages_to_admit(req, pin)
        with ExitStack() as undo:
            undo.callback(self.cache.unpin, pin)
            self._make_room(need)
            pages = undo.enter_context(self.kv.take(need, req.id))
            fault.point("residency.admit")
            self.rows.alloc([req])
            undo.pop_all()
        req.pin = pin
        req.num_pages = pin.num_pages + need
        req.extend_target = len(req.tokens)
        req.kv_len = req.kv_committed = match.num_tokens
        self._write(req.req_pool_idx, 0, np.concatenate([match.pages, pages.ids]))

    def grow(self, batch: ScheduleBatch, active: Ids | None) -> None:
        """One page more for each request (of the indices `active`) whose next token opens one."""
        at = self.page_openers(batch, active)
        if not len(at):
            return
        self._make_room(len(at))
        pages = self.kv.take_ids(len(at), batch.request_ids_cpu[at])
        rows, columns = batch.req_pool_indices_cpu[at], batch.seq_lens_cpu[at] // self.page_size
        self.rows.req_to_token[rows, columns] = pages
        self._writes.append((rows, columns, pages))

    def page_openers(self, batch: ScheduleBatch, active: Ids | None) -> Ids:
        """Indices of the requests whose next token is the first of a page."""
        if active is None:
            return np.flatnonzero(batch.seq_lens_cpu % self.page_size == 0)
        openers: Ids = active[batch.seq_lens_cpu[active] % self.page_size == 0]
        return openers

    def _make_room(self, num_pages: int) -> None:
        short = num_pages - self.kv.num_free
        if short > 0:
            self.cache.evict(short)

    def _write(self, row: int, start: int, pages: Ids) -> None:
        self.rows.write(row, start, pages)
        columns = np.arange(start, start + len(pages), dtype=np.int64)
        self._writes.append((np.full(len(pages), row, dtype=np.int64), columns, pages))

    def take_writes(self) -> RowWrites:
        """What changed in `req_to_token` since the last plan, in order."""
        writes, self._writes = self._writes, []
        if not writes:
            return _NOTHING, _NOTHING, _NOTHING
        if len(writes) == 1:
            return writes[0]
        rows, columns, pages = (np.concatenate(part) for part in zip(*writes, strict=True))
        return rows, columns, pages

    def write_again(self, rows: Iterable[int]) -> None:
        """Tell the device once more what these rows hold: the step that carried it may never have run."""
        for row in rows:
            pages = self.rows.req_to_token[row]
            num_pages = int(np.count_nonzero(pages))  # a row has no page 0 in it, and zeros after its last page
            self._write(row, 0, pages[:num_pages].astype(np.int64))

    # -- going out ------------------------------------------------------------------------------------------------

    def adopt(self, req: Request, num_committed: int) -> None:
        """Let the cache have the whole pages among the first `num_committed` tokens, all written by completed steps.

        Where it has such pages already, the request's row turns to those and its own copies are let go.
        """
        pin = req.pin
        assert pin is not None
        start, stop = pin.num_pages, num_committed // self.page_size
        if not self._reuse or stop <= start:
            return
        own = self.rows.pages(req.req_pool_idx, start, stop)
        adoption = self.cache.extend_pin(pin, req.key(stop * self.page_size), own, req.id)
        num_replaced = len(adoption.replaced)
        if num_replaced:
            self._write(req.req_pool_idx, start, adoption.replaced)
            self._let_go(_Leaving(self.last_launched, req.id, PAD, own[:num_replaced], None))

    def release(self, req: Request) -> None:
        """Take back all that the request holds, now or when no step in flight can touch it any more."""
        pin, row = req.pin, req.req_pool_idx
        assert pin is not None
        own = self.rows.pages(row, pin.num_pages, req.num_pages)
        req.pin, req.req_pool_idx, req.num_pages = None, PAD, 0
        # Nobody reads this row before its next tenant writes it, and which of two writes to one entry in the same step
        # wins is undefined on a device.
        self._writes = [write for write in self._writes if write[0][0] != row]
        self._let_go(_Leaving(self.last_launched, req.id, row, own, pin))

    def _let_go(self, leaving: _Leaving) -> None:
        if self.last_launched == self.last_committed:
            self._release(leaving)
        else:
            self._leaving.append(leaving)

    def committed(self, step: int) -> None:
        """`step` and all before it have completed: what only they could write is released."""
        self.last_committed = step
        while self._leaving and self._leaving[0].after_step <= step:
            self._release(self._leaving.popleft())

    def _release(self, leaving: _Leaving) -> None:
        if len(leaving.pages):
            self.kv.return_ids(leaving.pages, leaving.request_id)
        if leaving.row != PAD:
            self.rows.free_row(leaving.row)
        if leaving.pin is not None:
            self.cache.unpin(leaving.pin)

    # -- checking -------------------------------------------------------------------------------------------------

    def audit(self, reqs: Iterable[Request]) -> None:
        """Raise LedgerError (or fail an assertion) unless every row and page has exactly one holder (C8)."""
        rows: list[int] = []
        pins: list[Pin] = []
        own: dict[int, list[Ids]] = {}
        for req in reqs:
            assert req.status in (Status.EXTENDING, Status.DECODING), f"{req} holds nothing"
            assert req.pin is not None, f"{req} has no pin"
            rows.append(req.req_pool_idx)
            pins.append(req.pin)
            pages = self.rows.pages(req.req_pool_idx, req.pin.num_pages, req.num_pages)
            own.setdefault(req.id, []).append(pages)
        for leaving in self._leaving:
            rows += [leaving.row] if leaving.row != PAD else []
            pins += [leaving.pin] if leaving.pin else []
            own.setdefault(leaving.request_id, []).append(leaving.pages)
        self.rows.audit(rows)
        self.cache.check(pins)
        held = [Holder(owner, np.concatenate(chunks)) for owner, chunks in own.items()]
        self.kv.audit([*held, *self.cache.holders()])

    def reclaim_leaks(self) -> int:
        """When nobody holds anything: quarantine whatever the ledger still books for a request; how many pages."""
        lost = np.flatnonzero(self.kv.owner > 0)
        for owner in np.unique(self.kv.owner[lost]).tolist():
            self.kv.quarantine(lost[self.kv.owner[lost] == owner], owner, "leaked")
        return len(lost)

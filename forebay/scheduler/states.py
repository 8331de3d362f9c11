"""The recurrent states that admitted requests hold: what a step begins with, and which snapshots it takes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forebay.config.engine_config import SchedulerConfig, StateStrategy
from forebay.memory.checkpoints import Checkpoint, Reason, plan_checkpoints
from forebay.memory.hybrid_rows import StateRows
from forebay.memory.kinds.recurrent import States
from forebay.memory.radix_node import Node, Pin
from forebay.memory.slots import Holder, Ids, as_ids
from forebay.memory.tracking import Snapshot, Tracking
from forebay.requests.request import Request
from forebay.requests.schedule_batch import ScheduleBatch

Snapshots = list[tuple[int, int, int]]
"""Row, KV length and slot of each."""


class StateKeeper:
    """Live slots, tracking slots and snapshots of the running requests.

    With `extra_buffer` the step that passes a checkpoint writes the state to another slot as well. With `no_buffer`
    chunks end there, and the next plan copies the live state; the last state is given away when the request leaves.
    """

    def __init__(self, config: SchedulerConfig, rows: StateRows, cached: States) -> None:
        self.rows, self.pool, self.cached = rows, rows.mamba_pool, cached
        self._config = config
        self._extra_buffer = config.state.strategy is StateStrategy.EXTRA_BUFFER
        self._snapshots: Snapshots = []
        self.sources: list[Node] = []  # states that the step being planned copies
        self.num_taken = self.num_skipped = 0

    # -- coming in ----------------------------------------------------------------------------------------------------

    def admit(self, req: Request, branches: Iterable[int]) -> None:
        """The request has its row and slots. `branches` are lengths at which other prompts part from its own."""
        live, *buffers = self.rows.slots_of(req.req_pool_idx)
        req.tracking = Tracking(live, buffers, self._ahead(req, branches))

    def begin(self, req: Request, pin: Pin) -> None:
        """The request begins with the state at the end of `pin`, which is locked, or with none."""
        assert req.tracking is not None
        if pin.num_pages:
            self.pool.copy_from(self.cached.slot_of(pin.node), req.tracking.live)
            self.sources.append(pin.node)
        else:
            self.pool.clear_state(req.tracking.live)

    def _ahead(self, req: Request, branches: Iterable[int]) -> list[Checkpoint]:
        if not self._config.radix_cache:
            return []
        return plan_checkpoints(
            start=req.kv_len,
            num_prompt=req.num_prompt,
            page_size=self._config.page_size,
            hints=req.checkpoints,
            branches=branches,
            interval=self._config.state.checkpoint_interval,
        )

    # -- a step's snapshots -------------------------------------------------------------------------------------------

    def limit(self, req: Request, stop: int) -> int:
        """Where a chunk up to `stop` has to end."""
        tracking = req.tracking
        assert tracking is not None
        if self._extra_buffer:
            return stop
        return next((point.length for point in tracking.ahead if req.kv_len < point.length < stop), stop)

    def extend(self, req: Request, stop: int, step: int) -> None:
        """`step` computes the request's tokens up to `stop`."""
        tracking = req.tracking
        assert tracking is not None
        for length, reason in tracking.pop_ahead(stop if self._extra_buffer else req.kv_len):
            slot = self._take(req, reason)
            if slot is None:
                continue
            tracking.track(Snapshot(step, length, slot))
            if self._extra_buffer:
                self._snapshots.append((req.req_pool_idx, length, slot))
            else:
                self.pool.copy_from(tracking.live, slot)

    def _take(self, req: Request, reason: Reason) -> int | None:
        """A slot for a snapshot, as long as there is one that nobody needs more.

        Only where prompts are known to part does a state give way that somebody may come back to. A guess takes what is
        free or useless: one long prompt would otherwise push out as many conversations as it has messages.
        """
        if reason is Reason.BRANCH or self.cached.has_useless:
            self.cached.make_room(1)
        if not self.pool.num_free:
            self.num_skipped += 1
            return None
        self.num_taken += 1
        return self.pool.take_one(req.id)

    def decode(self, batch: ScheduleBatch, active: Ids | None, step: int, committed: int) -> None:
        """`step` decodes the requests (at the indices `active`), some of which reach a length at which they are
        tracked; `committed` is the last step that has completed."""
        if not (self._extra_buffer and self._config.radix_cache):
            return
        lens = batch.seq_lens_cpu
        due = lens % self._config.state.track_interval == 0
        for i in np.flatnonzero(due).tolist() if active is None else active[due[active]].tolist():
            req, length = batch.reqs[i], int(lens[i])
            tracking = req.tracking
            assert tracking is not None
            tracking.complete(committed)
            slot = tracking.next_buffer()
            if slot is not None:
                tracking.track(Snapshot(step, length, slot))
                self._snapshots.append((req.req_pool_idx, length, slot))
                self.num_taken += 1

    def start_over(self) -> None:
        """The step being planned will not be: nobody holds a slot any more."""
        self.take_snapshots()
        self.pool.take_clears()
        self.pool.take_copies()
        for source in self.sources:
            self.cached.unlock(source)
        self.sources = []

    def take_snapshots(self) -> Snapshots:
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    # -- going out ----------------------------------------------------------------------------------------------------

    def last(self, req: Request, num_committed: int) -> Snapshot | None:
        """Of a request that leaves: the latest state within its first `num_committed` tokens that is worth keeping.

        The live one, if no step in flight has taken it further and a page ends there; else the tracked one.
        """
        tracking, pin = req.tracking, req.pin
        assert tracking is not None
        assert pin is not None
        page_size = self._config.page_size
        known = pin.num_pages * page_size
        if req.kv_len == num_committed and num_committed % page_size == 0 and num_committed > known:
            return Snapshot(0, num_committed, tracking.live)
        if tracking.tracked and known < tracking.tracked.length <= num_committed:
            return tracking.tracked
        return None

    def is_finishing(self, req: Request) -> bool:
        """Whether the steps in flight will leave the state of a request that ends now where the cache can take it:
        behind tokens that are known, at a page's end."""
        return (
            self._config.radix_cache
            and req.committed_len < req.kv_len <= len(req.tokens)
            and req.kv_len % self._config.page_size == 0
        )

    def take_slots(self, req: Request, given: int | None) -> Ids:
        """All slots of a request that leaves, but the one that was given to the cache."""
        tracking = req.tracking
        assert tracking is not None
        slots = [*self.rows.take_slots(req.req_pool_idx), *tracking.own_slots]
        req.tracking = None
        return as_ids([slot for slot in slots if slot != given])

    def holder(self, req: Request) -> Holder:
        tracking = req.tracking
        assert tracking is not None
        return Holder(req.id, as_ids([tracking.live, *tracking.buffers, *tracking.own_slots]))

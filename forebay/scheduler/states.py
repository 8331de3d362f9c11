"""The recurrent states that admitted requests hold: what a step begins with, and which snapshots it takes."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.config.engine_config import SchedulerConfig, StateStrategy
from forebay.memory.checkpoints import Checkpoint, Reason, plan_checkpoints
from forebay.memory.holding import Residency, RowTable, Steps
from forebay.memory.hybrid_rows import StateRows
from forebay.memory.kinds.recurrent import States
from forebay.memory.radix_node import Node
from forebay.memory.slots import Holder, Ids, as_ids
from forebay.memory.tracking import Snapshot, Tracking

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

    def admit(self, held: Residency, *, num_prompt: int, hints: Iterable[int], branches: Iterable[int]) -> None:
        """The request has its row and slots. `hints` are lengths from which others are likely to go on, `branches`
        those at which other prompts part from its own."""
        live, *buffers = self.rows.slots_of(held.row)
        ahead: list[Checkpoint] = []
        if self._config.radix_cache:
            ahead = plan_checkpoints(
                start=held.kv_len,
                num_prompt=num_prompt,
                page_size=self._config.page_size,
                hints=hints,
                branches=branches,
                interval=self._config.state.checkpoint_interval,
            )
        held.tracking = Tracking(live, buffers, ahead)

    def begin(self, held: Residency) -> None:
        """The request begins with the state at the end of its pin, which is locked, or with none."""
        tracking, pin = _tracking(held), held.pin
        if pin.num_pages:
            self.pool.copy_from(self.cached.slot_of(pin.node), tracking.live)
            self.sources.append(pin.node)
        else:
            self.pool.clear_state(tracking.live)

    # -- a step's snapshots -------------------------------------------------------------------------------------------

    def limit(self, held: Residency, stop: int) -> int:
        """Where a chunk up to `stop` has to end."""
        if self._extra_buffer:
            return stop
        start = held.kv_len
        return next((point.length for point in _tracking(held).ahead if start < point.length < stop), stop)

    def extend(self, held: Residency, stop: int, step: int) -> None:
        """`step` computes the request's tokens up to `stop`."""
        tracking = _tracking(held)
        for length, reason in tracking.pop_ahead(stop if self._extra_buffer else held.kv_len):
            slot = self._take(held.id, reason)
            if slot is None:
                continue
            tracking.track(Snapshot(step, length, slot))
            if self._extra_buffer:
                self._snapshots.append((held.row, length, slot))
            else:
                self.pool.copy_from(tracking.live, slot)

    def _take(self, request_id: int, reason: Reason) -> int | None:
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
        return self.pool.take_one(request_id)

    def decode(self, table: RowTable, rows: Ids, steps: Steps) -> None:
        """The next step decodes these rows, some of which reach a length at which they are tracked."""
        if not (self._extra_buffer and self._config.radix_cache):
            return
        for row in rows[table.kv_len[rows] % self._config.state.track_interval == 0].tolist():
            held = table.resident(row)
            tracking, length = _tracking(held), held.kv_len
            tracking.complete(steps.committed)
            slot = tracking.next_buffer()
            if slot is not None:
                tracking.track(Snapshot(steps.launched + 1, length, slot))
                self._snapshots.append((row, length, slot))
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

    def last(self, held: Residency, num_committed: int) -> Snapshot | None:
        """Of a request that leaves: the latest state within its first `num_committed` tokens that is worth keeping.

        The live one, if no step in flight has taken it further and a page ends there; else the tracked one.
        """
        tracking, page_size = _tracking(held), self._config.page_size
        known = held.pin.num_pages * page_size
        if held.kv_len == num_committed and num_committed % page_size == 0 and num_committed > known:
            return Snapshot(0, num_committed, tracking.live)
        if tracking.tracked and known < tracking.tracked.length <= num_committed:
            return tracking.tracked
        return None

    def is_finishing(self, held: Residency, num_tokens: int) -> bool:
        """Whether the steps in flight will leave the state of a request that ends now, with `num_tokens`, where the
        cache can take it: behind tokens that are known, at a page's end."""
        kv_len = held.kv_len
        return (
            self._config.radix_cache
            and held.kv_committed < kv_len <= num_tokens
            and kv_len % self._config.page_size == 0
        )

    def take_slots(self, held: Residency, given: int | None) -> Ids:
        """All slots of a request that leaves, but the one that was given to the cache."""
        slots = [*self.rows.take_slots(held.row), *_tracking(held).own_slots]
        return as_ids([slot for slot in slots if slot != given])

    def holder(self, held: Residency) -> Holder:
        tracking = _tracking(held)
        return Holder(held.id, as_ids([tracking.live, *tracking.buffers, *tracking.own_slots]))


def _tracking(held: Residency) -> Tracking:
    assert held.tracking is not None, f"request {held.id} has no state"
    return held.tracking

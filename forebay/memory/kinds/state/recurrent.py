"""Recurrent states: what a step begins with, and which snapshots of them it takes (C6, C18)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from forebay.base.counters import Counter
from forebay.config.engine_config import SchedulerConfig, StateStrategy
from forebay.memory.anchors import Anchor, Reason, plan_anchors
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, Holding, RowTable
from forebay.memory.kinds.kind import (
    AdoptableKind,
    AdoptedKind,
    Arrival,
    CountingKind,
    DecodedKind,
    ExtendedKind,
    HeldKind,
    LockedKind,
    PlannedKind,
    Reserve,
    TransferredKind,
    TreeKind,
)
from forebay.memory.kinds.state.cached_states import CachedStates, StateTier
from forebay.memory.kinds.state.hybrid_rows import STATE, HybridReqToTokenPool
from forebay.memory.miss_reason import MissReason
from forebay.memory.slots import NO_IDS, NO_SLOT, Holder, Ids, as_ids


class Snapshot(NamedTuple):
    """The state after `length` tokens in `slot`, complete when `step` has committed; of a decode only if it has come to
    that length then."""

    step: int
    length: int
    slot: int


class Tracking:
    """`live` is the slot that steps read and write. `buffers` are the request's tracking slots, `ahead` the anchors
    that its chunks have not reached. Snapshots are `pending` until their step commits; then those in slots of their own
    are `ready` for the prefix cache, and of those in tracking slots the latest is `tracked`. The slot that a leaving
    request has `given` to the cache is its own no more.
    """

    __slots__ = ("ahead", "buffers", "given", "live", "pending", "ready", "tracked")

    def __init__(self, live: int, buffers: list[int], ahead: list[Anchor]) -> None:
        self.live, self.buffers, self.ahead = live, buffers, ahead
        self.pending: list[Snapshot] = []
        self.ready: list[Snapshot] = []
        self.tracked: Snapshot | None = None
        self.given = NO_SLOT

    def next_buffer(self) -> int | None:
        """The tracking slot for the next snapshot: never the one whose state is complete, if there are two, and none
        while a step in flight writes one (C6)."""
        if any(snapshot.slot in self.buffers for snapshot in self.pending):
            return None
        used = self.tracked.slot if self.tracked else 0
        return next((slot for slot in self.buffers if slot != used), self.buffers[0])

    def reserve_snapshot(self, step: int, length: int, *, too_late: bool = False) -> int | None:
        """Return the slot for the state at `length`, which a decode in `step` may reach; None if no slot is free.

        A step in flight that may reach the same length shares the snapshot: one of the two writes it. With `too_late` a
        step in flight may already pass `length` without this snapshot, so no new one is reserved."""
        slot = next((each.slot for each in self.pending if each.length == length and each.slot in self.buffers), None)
        if slot is None:
            slot = None if too_late else self.next_buffer()
        else:
            self.pending = [each for each in self.pending if each.slot != slot]
        if slot is not None:
            self.pending.append(Snapshot(step, length, slot))
        return slot

    @property
    def latest(self) -> Snapshot | None:
        """Return the latest tracked state, unless a step in flight may overwrite it."""
        return None if self.tracked and any(each.slot == self.tracked.slot for each in self.pending) else self.tracked

    def complete(self, step: int, kv_committed: int) -> None:
        """Record that `step` and all steps before it have committed, and that `kv_committed` tokens have KV."""
        while self.pending and self.pending[0].step <= step:
            snapshot = self.pending.pop(0)
            if snapshot.slot not in self.buffers:
                self.ready.append(snapshot)
            elif snapshot.length <= kv_committed:
                self.tracked = snapshot

    def pop_ahead(self, stop: int) -> list[Anchor]:
        """The anchors that a chunk up to `stop` reaches, which are then behind."""
        reached = []
        while self.ahead and self.ahead[0].length <= stop:
            reached.append(self.ahead.pop(0))
        return reached

    @property
    def to_come(self) -> list[int]:
        """Lengths at which the prefix cache will be given a state, in ascending order."""
        under_way = [snapshot.length for snapshot in (*self.ready, *self.pending) if snapshot.slot not in self.buffers]
        return [*under_way, *(point.length for point in self.ahead)]

    @property
    def own_slots(self) -> list[int]:
        """Slots besides the live and tracking ones."""
        return [snapshot.slot for snapshot in (*self.pending, *self.ready) if snapshot.slot not in self.buffers]


class States(
    TreeKind,
    HeldKind,
    ExtendedKind,
    DecodedKind,
    AdoptableKind,
    AdoptedKind,
    TransferredKind,
    LockedKind,
    PlannedKind,
    CountingKind,
):
    """Live slots, tracking slots and snapshots of the running requests, whose `Tracking` is at their row.

    With `extra_buffer` the step that passes an anchor writes the state to another slot as well. With `no_buffer`
    chunks end there, and the next plan copies the live state; the last state is given away when the request leaves.
    """

    COUNTERS = (
        Counter("states_taken", "States written down for the prefix cache"),
        Counter("states_skipped", "States that were wanted and had no slot"),
        Counter("states_evicted", "States dropped from the prefix cache to make room"),
        Counter("dead_kv_tokens"),  # which also falls: a gauge of its own in /metrics
    )

    in_tree: CachedStates
    name: ClassVar[str] = STATE
    missing: ClassVar[MissReason] = MissReason.STATE_MISSING
    of_pages: ClassVar[bool] = False

    def __init__(self, config: SchedulerConfig, rows: HybridReqToTokenPool) -> None:
        self.slots = self.pool = rows.mamba_pool
        self.in_tree = CachedStates(self.pool)
        self._in_tiers = StateTier(self.in_tree)
        self._rows, self._config = rows, config
        self.slots_per_request = self.in_tree.slots_per_request = rows.slots_per_req
        self.reserve = Reserve(per_row=rows.slots_per_req)
        self._extra_buffer = config.kinds.strategy is StateStrategy.EXTRA_BUFFER
        self._tracking: list[Tracking | None] = [None] * rows.slots.num_rows
        self.num_taken = self.num_skipped = 0

    def tracking(self, allocation: Allocation) -> Tracking:
        tracking = self._tracking[allocation.row]
        assert tracking is not None, f"request {allocation.id} has no state"
        return tracking

    # -- coming in ----------------------------------------------------------------------------------------------------

    def admit(self, allocation: Allocation, arrival: Arrival, draft: Draft) -> None:
        """Begin tracking; the request's slots came with its row."""
        live, *buffers = self._rows.slots_of(allocation.row)
        ahead: list[Anchor] = []
        if self._config.radix_cache:
            ahead = plan_anchors(
                start=allocation.kv_len,
                num_prompt=arrival.num_prompt,
                page_size=self._config.page_size,
                resume_points=arrival.resume_points,
                branches=arrival.branches,
                interval=self._config.kinds.anchor_interval,
            )
        self._tracking[allocation.row] = Tracking(live, buffers, ahead)
        if not arrival.from_elsewhere:
            self._begin(allocation, draft)
        elif allocation.pin.num_pages:
            self.in_tree.unlock(allocation.pin.node, NO_IDS)  # the state comes with the rest

    def _begin(self, allocation: Allocation, draft: Draft) -> None:
        """With the state at the end of its pin, which is locked until it is copied, or with none."""
        live, pin = self.tracking(allocation).live, allocation.pin
        if pin.num_pages:
            self.pool.copy_from(self.in_tree.slot_of(pin.node), live, draft)
            draft.reads.append(Holding(self, locked=(pin.node,)))
        else:
            self.pool.clear_state(live, draft)

    def transfer_slots(self, allocation: Allocation, pages: Ids, start: int = 0) -> Ids:
        return as_ids([self.tracking(allocation).live])

    # -- a step's snapshots -------------------------------------------------------------------------------------------

    def limit(self, allocation: Allocation, stop: int) -> int:
        if self._extra_buffer:
            return stop
        start = allocation.kv_len
        return next((point.length for point in self.tracking(allocation).ahead if start < point.length < stop), stop)

    def extend(self, allocation: Allocation, stop: int, draft: Draft) -> None:
        tracking = self.tracking(allocation)
        for length, reason in tracking.pop_ahead(stop if self._extra_buffer else allocation.kv_len):
            slot = self._take(allocation.id, reason)
            if slot is None:
                continue
            tracking.pending.append(Snapshot(draft.step, length, slot))
            if self._extra_buffer:
                draft.copies_at.append((allocation.row, length, slot))
            else:
                self.pool.copy_from(tracking.live, slot, draft)

    def _take(self, request_id: int, reason: Reason) -> int | None:
        """Return a slot for a snapshot, None if none can be spared.

        Only at a length at which prompts are known to part is a useful cached state evicted. Other snapshots take free
        slots, or those of states that a later one shadows: one long prompt would otherwise evict as many conversations
        as it has messages.
        """
        if reason is Reason.BRANCH or self.in_tree.has_useless:
            self.in_tree.make_room(1)
        if not self.pool.num_free:
            self.num_skipped += 1
            return None
        self.num_taken += 1
        return self.pool.take_one(request_id)

    def decode(self, table: RowTable, rows: Ids, committed: int, draft: Draft) -> None:
        """Some rows reach a length at which they are tracked, or may reach it."""
        if not (self._extra_buffer and self._config.radix_cache):
            return
        interval, bound = self._config.kinds.track_interval, table.kv_bound[rows]
        least = bound - table.num_drafts[rows]
        lengths = -(-least // interval) * interval
        due = lengths <= bound
        before = bound - 1 - (0 if draft.num_drafts is None else draft.num_drafts)
        for row, length, most in zip(rows[due].tolist(), lengths[due].tolist(), before[due].tolist(), strict=True):
            allocation = table.allocation_of(row)
            tracking = self.tracking(allocation)
            tracking.complete(committed, allocation.kv_committed)
            num_pending = len(tracking.pending)
            slot = tracking.reserve_snapshot(draft.step, length, too_late=length <= most)
            if slot is not None:
                draft.copies_at.append((row, length, slot))
                self.num_taken += len(tracking.pending) - num_pending

    def columns(self, draft: Draft, rows: Ids) -> dict[str, Ids]:
        """Snapshots by sequence and then by length."""
        columns = {"state_slots": self._rows.req_index_to_mamba_index_mapping[rows].astype(np.int64)}
        if draft.copies_at:
            place = {row: i for i, row in enumerate(rows.tolist())}
            snapshots = sorted((place[row], length, slot) for row, length, slot in draft.copies_at)
            columns |= zip(("snap_seqs", "snap_lens", "snap_slots"), np.array(snapshots, dtype=np.int64).T, strict=True)
        if draft.clears:
            columns["clears"] = as_ids(draft.clears)
        if draft.copies:
            columns |= zip(("copy_src", "copy_dst"), np.array(draft.copies, dtype=np.int64).T, strict=True)
        return columns

    # -- going out ----------------------------------------------------------------------------------------------------

    def adoptable_ends(
        self, allocation: Allocation, ends: Sequence[int], committed: int, *, last: bool
    ) -> Sequence[int]:
        """Where snapshots are complete that the cache is to have, and with `last` the latest of all."""
        tracking = self.tracking(allocation)
        # Tokens may have been accepted past a request's end: a slot has the state of any snapshot that they reached.
        tracking.complete(committed, max(allocation.kv_committed, ends[-1]))
        if last and (latest := self._latest(allocation, tracking, ends[-1])):
            tracking.ready.append(latest)
        return [snapshot.length for snapshot in tracking.ready]

    def _latest(self, allocation: Allocation, tracking: Tracking, num_committed: int) -> Snapshot | None:
        """The latest state within the first `num_committed` tokens, behind those that the cache will have.

        The live one, if no step in flight has taken it further and a page ends there; else the tracked one.
        """
        page_size = self._config.page_size
        known = tracking.ready[-1].length if tracking.ready else allocation.pin.num_pages * page_size
        if allocation.kv_bound == num_committed and num_committed % page_size == 0 and num_committed > known:
            return Snapshot(0, num_committed, tracking.live)
        latest = tracking.latest
        return latest if latest and known < latest.length <= num_committed else None

    def next_adoptable_end(self, allocation: Allocation, stop: int, end: int | None) -> int | None:
        return next((length for length in self.tracking(allocation).to_come if length >= stop), None)

    def adopted(self, allocation: Allocation, start: int, end: int) -> Holding | None:
        """The cache gets the snapshot of this length, unless it has one: then it is the request's as before."""
        tracking = self.tracking(allocation)
        snapshot = tracking.ready.pop(0)
        own = snapshot.slot == tracking.live or snapshot.slot in tracking.buffers
        if self.in_tree.attach(allocation.pin, snapshot.slot, snapshot.length, allocation.id):
            tracking.given = snapshot.slot if own else NO_SLOT
            return None
        return None if own else Holding(self, as_ids([snapshot.slot]))

    def is_finishing(self, allocation: Allocation, num_tokens: int) -> bool:
        """Return whether the steps in flight will leave the state at the end of a page, after known tokens, so that the
        cache can adopt it."""
        kv_len = allocation.kv_bound
        return (
            self._config.radix_cache
            and not allocation.num_drafts
            and allocation.kv_committed < kv_len <= num_tokens
            and kv_len % self._config.page_size == 0
        )

    def release_all(self, allocation: Allocation) -> Holding:
        """All its slots, but the one that was given to the cache; which stays there while another engine reads it."""
        tracking, self._tracking[allocation.row] = self.tracking(allocation), None
        slots = [*self._rows.take_slots(allocation.row), *tracking.own_slots]
        locked = (allocation.pin.node,) if allocation.ticket and tracking.given == tracking.live else ()
        for node in locked:
            self.in_tree.lock(node, NO_IDS)
        return Holding(self, as_ids([slot for slot in slots if slot != tracking.given]), locked)

    def return_slots(self, holding: Holding, owner: int) -> None:
        if len(holding.ids):
            self.pool.free(holding.ids, owner)
        for node in holding.locked:
            self.in_tree.unlock(node, NO_IDS)

    def clear(self) -> None:
        self.in_tree.clear()
        self._tracking = [None] * len(self._tracking)

    # -- telling and checking -----------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, float]:
        return {
            "states_taken": self.num_taken,
            "states_skipped": self.num_skipped,
            "states_evicted": self.in_tree.num_evicted,
            "dead_kv_tokens": self.in_tree.num_dead_pages * self._config.page_size,
        }

    def holder(self, allocation: Allocation) -> Holder:
        tracking = self.tracking(allocation)
        return Holder(allocation.id, as_ids([tracking.live, *tracking.buffers, *tracking.own_slots]))

    def check_locks(self, allocations: Iterable[Allocation], holdings: Iterable[Holding]) -> None:
        locked = {node for holding in holdings for node in holding.locked}
        assert self.in_tree.num_locked == len(locked), "a cached state is locked although no step copies it"

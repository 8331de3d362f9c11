"""The recurrent state of one running request: where it is, and which snapshots of it there are (C18)."""

from __future__ import annotations

from typing import NamedTuple

from forebay.memory.anchors import Anchor
from forebay.memory.slots import NO_SLOT


class Snapshot(NamedTuple):
    """The state after `length` tokens in `slot`, complete when `step` has committed."""

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

    def track(self, snapshot: Snapshot) -> None:
        """A step that is being planned writes a snapshot."""
        self.pending.append(snapshot)
        if self.tracked and self.tracked.slot == snapshot.slot:
            self.tracked = None  # overwritten from now on

    def complete(self, step: int) -> None:
        """`step` and all before it have committed."""
        while self.pending and self.pending[0].step <= step:
            snapshot = self.pending.pop(0)
            if snapshot.slot in self.buffers:
                self.tracked = snapshot
            else:
                self.ready.append(snapshot)

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

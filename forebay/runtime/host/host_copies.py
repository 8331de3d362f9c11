"""The copies in host memory of what retracted requests had on the device (C26)."""

from __future__ import annotations

from forebay.pools.mover import Mover, Places, Rows, num_bytes
from forebay.requests.step_plan import StepPlan


class NoHostCopy(Exception):
    """A plan loads a copy that was never saved, or was dropped."""


class HostCopies:
    """By request. A copy is there from the step that saves it to the one that loads or drops it."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._copies: dict[int, Rows] = {}

    def check(self, plan: StepPlan) -> None:
        """Raise NoHostCopy for a load of nothing."""
        there = (self._copies.keys() | {copy.request_id for copy in plan.host.saves}) - set(plan.host.drops)
        missing = sorted({copy.request_id for copy in plan.host.loads} - there)
        if missing:
            raise NoHostCopy(f"requests {missing} have no copy on the host; requests {sorted(there)} have")

    def save(self, request_id: int, places: Places) -> None:
        self._copies[request_id] = self._mover.read(places)

    def drop(self, request_id: int) -> None:
        """Drop a copy. Without one, do nothing: the step that was to save it may have failed."""
        self._copies.pop(request_id, None)

    def load(self, request_id: int, places: Places) -> None:
        """Bring the copy back; it is gone then."""
        self._mover.write(self._copies.pop(request_id), places)

    @property
    def num_bytes(self) -> int:
        return sum(map(num_bytes, self._copies.values()))

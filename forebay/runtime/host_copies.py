"""The copies in host memory of what retracted requests had on the device (C26)."""

from __future__ import annotations

from forebay.pools.cache_pool import CachePool, CpuCopy, Places
from forebay.requests.step_plan import StepPlan


class NoHostCopy(Exception):
    """A plan loads what was never saved, or is gone."""


class HostCopies:
    """By request. A copy is there from the step that saves it to the one that loads or drops it."""

    def __init__(self, cache: CachePool) -> None:
        self._cache = cache
        self._copies: dict[int, CpuCopy] = {}

    def check(self, plan: StepPlan) -> None:
        """Raise NoHostCopy for a load of nothing."""
        there = (self._copies.keys() | {kept.request_id for kept in plan.saves}) - set(plan.drops)
        missing = sorted({kept.request_id for kept in plan.loads} - there)
        if missing:
            raise NoHostCopy(f"requests {missing} have no copy on the host; requests {sorted(there)} have")

    def save(self, request_id: int, places: Places) -> None:
        self._copies[request_id] = self._cache.get_cpu_copy(places)

    def drop(self, request_id: int) -> None:
        """Nothing happens where there is none: the step that was to save it may have failed."""
        self._copies.pop(request_id, None)

    def load(self, request_id: int, places: Places) -> None:
        """Bring the copy back; it is gone then."""
        self._cache.load_cpu_copy(self._copies.pop(request_id), places)

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

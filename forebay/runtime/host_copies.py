"""The copies in host memory of what retracted requests had on the device (C26)."""

from __future__ import annotations

from forebay.pools.cache_pool import CachePool, CpuCopy
from forebay.requests.step_plan import StepPlan


class HostCopies:
    """By request. A copy is there from the step that saves it to the one that loads or drops it."""

    def __init__(self, cache: CachePool) -> None:
        self._cache = cache
        self._copies: dict[int, CpuCopy] = {}

    def save(self, plan: StepPlan) -> None:
        """Make the plan's copies, then drop what it names: nothing, where the step that was to save it has failed."""
        for kept in plan.saves:
            copy = self._cache.get_cpu_copy(kept.pages, kept.window_pages, kept.state_slot)
            self._copies[kept.request_id] = copy
        for request_id in plan.drops:
            self._copies.pop(request_id, None)

    def load(self, plan: StepPlan) -> None:
        """Bring the plan's copies back; they are gone then."""
        for kept in plan.loads:
            copy = self._copies.pop(kept.request_id)
            self._cache.load_cpu_copy(copy, kept.pages, kept.window_pages, kept.state_slot)

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

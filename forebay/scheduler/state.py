"""What the scheduler can tell about itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.memory.slots import CACHE, FREE, QUARANTINE, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """One pool by holder, in its own unit: free + running + cached + quarantined = total (C8)."""

    name: str
    total: int
    free: int
    running: int
    cached: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """A snapshot. `page_map` samples pages in order of their number: 0 free, 1 running, 2 cached, 3 other."""

    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    oldest_wait_s: float
    pools: tuple[PoolUsage, ...]
    counters: dict[str, float]
    page_map: list[int]


class Counters(dict[str, float]):
    """Numbers that only grow, by name; `misses.<reason>` and `finished.<reason>` are counted per reason."""

    def add(self, name: str, amount: float = 1) -> None:
        self[name] = self.get(name, 0) + amount


def pool_usage(slots: Slots, cached: int = 0) -> PoolUsage:
    return PoolUsage(
        name=slots.name,
        total=slots.capacity,
        free=slots.num_free,
        running=slots.capacity - slots.num_free - cached - slots.num_quarantined,
        cached=cached,
        quarantined=slots.num_quarantined,
    )


def page_map(slots: Slots, cells: int = 256) -> list[int]:
    """Who holds a sample of the pool's slots, evenly spread."""
    ids = np.linspace(1, slots.capacity, min(cells, slots.capacity)).astype(np.int64)
    owner = slots.owner[ids]
    kinds = np.select([owner <= FREE, owner > 0, owner == CACHE, owner == QUARANTINE], [0, 1, 2, 3], default=3)
    cells_of: list[int] = kinds.tolist()
    return cells_of

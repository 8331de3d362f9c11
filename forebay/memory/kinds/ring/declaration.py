"""The declaration of state rings as a kind of cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from forebay.base.parts import Part
from forebay.base.units import human_bytes
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.budget import BudgetLine, Decided, KindDemand, MemoryBudget, MemoryDemand
from forebay.memory.kinds.declared import DeclaredKind, KindSize, Sizing
from forebay.memory.kinds.ring.rings import RING, Rings
from forebay.memory.req_to_token_pool import ReqToTokenPool


class RingWork(Part, frozen=True, kw_only=True):
    """A plan has nothing about rings: a sequence's row says which one is its own."""


@dataclass(frozen=True, kw_only=True)
class RingDemand(KindDemand):
    """One ring for each request row."""

    name: ClassVar[str] = RING
    unit: ClassVar[str] = "state rings"
    settings: ClassVar[frozenset[str]] = frozenset()
    absent: ClassVar[str] = "no layer keeps a state by request row"

    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        return num_requests

    def num_slots(self, demand: MemoryDemand, rows: int, given: Mapping[str, int]) -> Decided:
        return rows, "one for each request row"

    def lines(self, budget: MemoryBudget, reason: str) -> list[BudgetLine]:
        num_bytes = human_bytes(budget.num_bytes[self.name])
        why = f"({budget.num_slots[self.name]} + 1 padding) of {human_bytes(self.slot_bytes)}: {reason}"
        return [BudgetLine(self.unit, num_bytes, why)]

    def num_cached(self, budget: MemoryBudget, num_running: int, context: int) -> int:
        """Return the number of pages: the prefix cache needs no ring."""
        return budget.num_pages


def _demand(size: KindSize, sizing: Sizing) -> RingDemand:
    return RingDemand(slot_bytes=size.num_bytes)


def _make(config: SchedulerConfig, rows: ReqToTokenPool) -> Rings | None:
    num_rows = config.kinds.num_slots_of(RING)
    return Rings(num_rows, ledger=config.ledger) if num_rows else None


STATE_RINGS: Final = DeclaredKind(
    kind=Rings,
    work=RingWork,
    demand_type=RingDemand,
    demand=_demand,
    make=_make,
    of_a_request=lambda size: f"state rings {human_bytes(size.num_bytes)} a request, however long",
)

"""The declaration of resident copies as a kind of cache, and how many pages they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.budget import PARTS, BudgetLine, KindDemand, MemoryBudget, MemoryDemand, in_tokens
from forebay.memory.kinds.declared import DeclaredKind, KindSize, Sizing
from forebay.memory.kinds.resident.residents import RESIDENT, Residents
from forebay.memory.kinds.resident.work import ResidentWork
from forebay.memory.req_to_token_pool import ReqToTokenPool

_COLUMN_BYTES: Final = 8  # of a layer and column: its position, and when it was used
_NEWEST_BYTES: Final = 4  # of a row and token of its last page


def hot_row_bytes(num_columns: int, page_size: int, size: KindSize) -> int:
    """Return the bytes of a request row's hot buffer over all layers."""
    if not num_columns:
        return 0
    columns = (num_columns + page_size) * size.num_bytes + num_columns * size.num_layers * _COLUMN_BYTES
    return columns + page_size * _NEWEST_BYTES


@dataclass(frozen=True, kw_only=True)
class ResidentDemand(KindDemand):
    """Copies on the device of one in `ratio` pages. No request needs any."""

    name: ClassVar[str] = RESIDENT
    unit: ClassVar[str] = "resident pages"
    settings: ClassVar[frozenset[str]] = frozenset()
    absent: ClassVar[str] = "HiSparse is off (--enable-hisparse)"

    ratio: float
    chunked_prefill_size: int

    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        """Return the pages of one chunk, and the share of the pages that requests have at least. With fewer than a
        chunk's, a prompt would read from the host what it has just computed."""
        chunk = ceil_div(min(self.chunked_prefill_size, demand.possible_context), demand.page_size)
        return chunk + num_requests * ceil_div(demand.pages_at_least * (self.per_page or 0), PARTS)

    def lines(self, budget: MemoryBudget, reason: str) -> list[BudgetLine]:
        num_pages = budget.num_slots[self.name]
        ratio = f"one for {self.ratio:g} KV pages (host_to_device_ratio), for prompts that are computed"
        num_bytes = f"({num_pages} + 1) pages, {human_bytes(self.slot_bytes // budget.page_size)} per token"
        rows, demand = budget.num_rows, budget.demand
        each = f"({rows} + 1 padding) rows of {human_bytes(demand.hot_row_bytes)}, {demand.hot_tokens} tokens each"
        on_host = human_bytes((budget.num_pages + 1) * self.slot_bytes)
        where = (
            "a file, or a GPU's host memory, beside this memory"
            if demand.host_bytes_per_token
            else "host memory, part of the KV cache"
        )
        return [
            BudgetLine("resident pages", in_tokens(num_pages, budget.page_size), ratio),
            BudgetLine("resident cache", human_bytes(budget.num_bytes[self.name]), num_bytes),
            BudgetLine("hot buffers", human_bytes((rows + 1) * demand.hot_row_bytes), each),
            BudgetLine("host tier", on_host, f"{where}: the KV of sparse attention"),
        ]

    def num_cached(self, budget: MemoryBudget, num_running: int, context: int) -> int:
        """Return the number of pages: a conversation resumes without a resident copy."""
        return budget.num_pages


def _demand(size: KindSize, sizing: Sizing) -> ResidentDemand:
    ratio = sizing.hisparse.host_to_device_ratio
    return ResidentDemand(
        slot_bytes=sizing.page_size * size.num_bytes,
        per_page=max(1, round(PARTS / ratio)),
        ratio=ratio,
        chunked_prefill_size=sizing.scheduling.chunked_prefill_size,
    )


def _make(config: SchedulerConfig, rows: ReqToTokenPool) -> Residents | None:
    num_pages = config.kinds.num_slots_of(RESIDENT)
    return Residents(num_pages, config.num_pages, rows, ledger=config.ledger) if num_pages else None


def _of_a_request(size: KindSize) -> str:
    return f"a hot buffer, {human_bytes(size.num_bytes)} for each of its tokens (device_buffer_size)"


RESIDENT_COPIES: Final = DeclaredKind(
    kind=Residents,
    work=ResidentWork,
    demand_type=ResidentDemand,
    demand=_demand,
    make=_make,
    of_a_request=_of_a_request,
)

"""How many window pages memory is divided into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forebay.base.units import ceil_div, human_bytes
from forebay.memory.budget import PARTS, BudgetLine, KindDemand, MemoryBudget, MemoryDemand, in_tokens
from forebay.memory.kinds.kind import Reserve
from forebay.memory.kinds.window.cached_windows import WINDOW


def window_margin(page_size: int, track_interval: int) -> int:
    """Return the tokens behind its window whose window pages a request still holds.

    Another request then has a whole window at each length at which it can resume: at the end of the last page, or at
    the last tracked state (`track_interval` 0: states are not tracked).
    """
    return page_size + track_interval


def window_pages_per_request(
    window: int, page_size: int, depth: int, track_interval: int = 0, *, width: int = 1
) -> int:
    """Return the most window pages that a request needs for the tokens it still reads and the margin behind them.

    `depth` more steps may be in flight, of at most `width` tokens each, and the first and last page may be partial."""
    ahead = (depth + 1) * width - 1
    return ceil_div(window - 1 + ahead + window_margin(page_size, track_interval), page_size) + 2


def window_pages_in_flight(chunked_prefill_size: int, page_size: int, depth: int) -> int:
    """Window pages that chunks fill at most before the window moves past them. They are those of the step that is
    planned, of `depth` steps in flight, and of as many committed steps whose requests have ended and wait for those in
    flight."""
    return (2 * depth + 1) * ceil_div(chunked_prefill_size, page_size)


def window_reserve(
    window: int, page_size: int, depth: int, track_interval: int, *, width: int, most_prompt_tokens: int
) -> Reserve:
    """Return the window pages that memory is divided into at least, and that admission promises. `most_prompt_tokens`
    are those of one step: a chunk, or a longer run of image tokens that must not be cut."""
    return Reserve(
        per_row=window_pages_per_request(window, page_size, depth, track_interval, width=width),
        in_flight=window_pages_in_flight(most_prompt_tokens, page_size, depth),
    )


@dataclass(frozen=True, kw_only=True)
class WindowDemand(KindDemand):
    """Pages for a window of `window` tokens, the model's."""

    name: ClassVar[str] = WINDOW
    unit: ClassVar[str] = "window pages"
    settings: ClassVar[frozenset[str]] = frozenset({"swa_full_tokens_ratio"})
    absent: ClassVar[str] = "no layer has a window"

    window: int
    ratio: float  # of tokens to those of full KV
    track_interval: int = 0
    overlap_depth: int = 0
    width: int = 1  # of decodes
    most_prompt_tokens: int = 1  # of one step

    def num_read(self, demand: MemoryDemand) -> int:
        """Return the window: no request reads further back than its context."""
        return min(self.window, demand.possible_context)

    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        reserve = window_reserve(
            self.num_read(demand),
            demand.page_size,
            self.overlap_depth,
            self.track_interval,
            width=self.width,
            most_prompt_tokens=self.most_prompt_tokens,
        )
        return num_requests * reserve.per_row + reserve.in_flight

    def lines(self, budget: MemoryBudget, reason: str) -> list[BudgetLine]:
        rows, page_size, num_pages = budget.num_rows, budget.page_size, budget.num_slots[self.name]
        least = self.least(budget.demand, rows)
        why = f"{self.ratio:g} of the KV pages (--swa-full-tokens-ratio)"
        if num_pages == least:
            why = f"what {rows} requests need"
        elif num_pages < budget.num_pages * (self.per_page or 0) // PARTS:
            why = f"what one request's context leaves, below {why}"
        size = f"{human_bytes(self.slot_bytes // page_size)} per token, {self.num_read(budget.demand)} tokens of window"
        num_bytes = human_bytes(budget.num_bytes[self.name])
        return [
            BudgetLine("window pages", in_tokens(num_pages, page_size), f"{why}; at least {least}"),
            BudgetLine("window cache", num_bytes, f"({num_pages} + 1) pages, {size}"),
        ]

    def num_cached(self, budget: MemoryBudget, num_running: int, context: int) -> int:
        used = self.least(budget.demand, num_running) if num_running else 0
        each = ceil_div(min(context, self.num_read(budget.demand)), budget.page_size)
        return (budget.num_slots[self.name] - used) // each

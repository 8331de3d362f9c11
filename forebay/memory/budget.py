"""From bytes to KV pages, window pages, state slots and rows, before any weight is loaded (C4).

Too little memory for what was asked lowers the limits, with a reason for each, instead of refusing to start; only when
not a single request could run is it an error. `forebay plan` and the start-up report show the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import MemoryOptions
from forebay.memory.footprint import tracking_slots, window_pages_in_flight, window_pages_per_request
from forebay.memory.hybrid_rows import effective_mamba_size

_ROW_BYTES: Final = 64  # last token, length and sampling columns of one request row
# Cached states nearer to each other than this save less than a step's work. It only bounds what is set aside for them.
_STATE_SPACING_TOKENS: Final = 16
# Pages of models that keep no KV cost nothing on the device and about 50 bytes each on the host.
_MOST_EMPTY_PAGES: Final = 1 << 20
_PARTS: Final = 1000  # ratios are taken to three places, so that the division is exact


class BudgetLine(NamedTuple):
    """One term of the sum, or one limit: what, how much, and how it came about."""

    item: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand(MemoryOptions):
    """What is to be divided and what was asked for. Bytes per token and per slot are those of all layers together, 0
    where no layer keeps such a thing; `window` is in tokens.

    `max_total_tokens` and `max_mamba_cache_size` None: as the memory and the ratios have it. `extra_buffer` counts only
    beside a prefix cache: without one nothing is tracked.
    """

    chunked_prefill_size: int = 1
    overlap_depth: int = 0
    kv_bytes_per_token: int
    window_bytes_per_token: int = 0
    window: int = 0
    track_interval: int = 0
    state_bytes: int = 0
    radix_cache: bool = True
    extra_buffer: bool = True

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.kv_bytes_per_token

    @property
    def window_page_bytes(self) -> int:
        return self.page_size * self.window_bytes_per_token

    @property
    def num_tracking(self) -> int:
        return tracking_slots(self.extra_buffer and self.radix_cache, self.overlap_depth)

    @property
    def slots_per_request(self) -> int:
        """The live state, those being tracked, and one in the prefix cache to come back to."""
        return 1 + self.num_tracking + self.radix_cache if self.state_bytes else 0

    @property
    def most_pages(self) -> int | None:
        return None if self.max_total_tokens is None else ceil_div(self.max_total_tokens, self.page_size)

    @property
    def possible_context(self) -> int:
        """The context length, cut to what all of the memory could hold as KV."""
        limits = [self.context_length]
        if self.max_total_tokens is not None:
            limits.append(self.max_total_tokens)
        if self.page_bytes:
            limits.append(max(1, self.kv_cache_bytes // self.page_bytes) * self.page_size)
        return min(limits)

    @property
    def kept_window(self) -> int:
        """No request reads further back than its context."""
        return min(self.window, self.possible_context)

    def window_pages(self, num_requests: int) -> int:
        """What so many requests need at least."""
        if not self.window_bytes_per_token:
            return 0
        depth, page = self.overlap_depth, self.page_size
        tracked = self.track_interval if self.state_bytes else 0
        per_request = window_pages_per_request(self.kept_window, page, depth, tracked)
        return num_requests * per_request + window_pages_in_flight(self.chunked_prefill_size, page, depth)

    def row_bytes(self, num_requests: int, context_length: int) -> int:
        """4 bytes of page table per page of context, and the columns; one row more than can be used, for padding."""
        return (num_requests + 1) * (4 * ceil_div(context_length, self.page_size) + _ROW_BYTES)

    def bytes_of(self, *, rows: int, pages: int, window_pages: int, slots: int) -> int:
        """Each pool has one more than can be used: its padding."""
        windows = (window_pages + 1) * self.window_page_bytes if window_pages else 0
        states = (slots + 1) * self.state_bytes if slots else 0
        return self.row_bytes(rows, self.possible_context) + (pages + 1) * self.page_bytes + windows + states

    def least_bytes(self, num_requests: int) -> int:
        """What so many requests need at least to run at once: a page of KV each, a window, and their state slots."""
        return self.bytes_of(
            rows=num_requests,
            pages=num_requests,
            window_pages=self.window_pages(num_requests),
            slots=num_requests * self.slots_per_request,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """How large the pools are, without the padding page, slot and row; `context_length` is the most tokens of a row."""

    page_size: int
    num_pages: int
    num_window_pages: int = 0
    num_state_slots: int = 0
    max_running_requests: int
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget(PoolSizes):
    """How the cache memory is divided. `window` is the model's, cut to the context. Beside a prefix cache
    `slots_per_request` includes one cached state for each running request."""

    slots_per_request: int
    window: int
    kv_bytes: int
    window_bytes: int
    state_bytes: int
    row_bytes: int
    lines: tuple[BudgetLine, ...]

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.window_bytes + self.state_bytes + self.row_bytes


def divide_memory(demand: MemoryDemand) -> MemoryBudget:
    """Divide `demand.kv_cache_bytes`: first what requests need at least, then states against KV by
    `mamba_full_memory_ratio`, then windows against full KV by `swa_full_tokens_ratio`.

    Raises ConfigError when not a single request could run.
    """
    _refuse_too_little(demand)
    rows, rows_why = _num_rows(demand)
    slots, slots_why = _num_slots(demand, rows)
    pages, windows, pages_why = _num_pages(demand, rows, slots)
    context = min(demand.context_length, pages * demand.page_size)
    context_why = "the KV cache holds a request that long"
    if context < demand.context_length:
        context_why = f"lowered from {demand.context_length}: a request cannot be longer than the KV cache"
    budget = MemoryBudget(
        page_size=demand.page_size,
        num_pages=pages,
        num_window_pages=windows,
        num_state_slots=slots,
        slots_per_request=demand.slots_per_request,
        window=demand.kept_window,
        max_running_requests=rows,
        context_length=context,
        kv_bytes=(pages + 1) * demand.page_bytes,
        window_bytes=(windows + 1) * demand.window_page_bytes if windows else 0,
        state_bytes=(slots + 1) * demand.state_bytes if slots else 0,
        row_bytes=demand.row_bytes(rows, context),
        lines=(),
    )
    reasons = {"pages": pages_why, "slots": slots_why, "rows": rows_why, "context": context_why}
    return _with_lines(demand, budget, reasons)


def _refuse_too_little(demand: MemoryDemand) -> None:
    least = demand.least_bytes(1)
    if least <= demand.kv_cache_bytes:
        return
    parts = [f"two pages (one is padding) of {demand.page_size} tokens at {human_bytes(demand.kv_bytes_per_token)}"]
    if demand.window_bytes_per_token:
        parts.append(f"{demand.window_pages(1)} window pages of {human_bytes(demand.window_page_bytes)}")
    if demand.state_bytes:
        parts.append(f"{demand.slots_per_request} state slots of {human_bytes(demand.state_bytes)} and a padding slot")
    raise ConfigError(
        f"the caches have {human_bytes(demand.kv_cache_bytes)} and one request needs at least {human_bytes(least)}: "
        f"{', '.join(parts)}: raise --kv-cache-bytes or --mem-fraction-static, or lower --page-size"
    )


def _num_rows(demand: MemoryDemand) -> tuple[int, str]:
    """As many requests as were asked for and as their least needs allow."""
    asked = demand.max_running_requests
    one = demand.least_bytes(1)
    by_memory = 1 + (demand.kv_cache_bytes - one) // (demand.least_bytes(2) - one)
    limits = [(asked, "--max-running-requests"), (by_memory, _why_memory(demand))]
    if demand.most_pages is not None:
        limits.append((demand.most_pages, f"lowered from {asked}: each running request needs a page of its own"))
    if demand.state_bytes:
        slots = max(_shared_slots(demand, 1), demand.max_mamba_cache_size or 0)
        why = f"lowered from {asked}: {slots} state slots, {demand.slots_per_request} for each request"
        limits.append((max(1, slots // demand.slots_per_request), why))
    return min(limits, key=lambda limit: limit[0])


def _why_memory(demand: MemoryDemand) -> str:
    needs = ["a page of its own"] if demand.page_bytes else []
    if demand.window_bytes_per_token:
        needs.append(f"{demand.window_pages(1) - demand.window_pages(0)} window pages")
    if demand.state_bytes:
        needs.append(f"{demand.slots_per_request} state slots")
    return f"lowered from {demand.max_running_requests}: each running request needs {', '.join(needs)}"


def _shared_slots(demand: MemoryDemand, rows: int) -> int:
    """State slots by the ratio of their memory to that of KV. All of it where there is no KV."""
    left = demand.kv_cache_bytes - demand.row_bytes(rows, demand.possible_context)
    if _has_tokens(demand):
        ratio = demand.mamba_full_memory_ratio
        left = int(left * ratio / (1 + ratio))
    return max(0, left // demand.state_bytes - 1)


def _num_slots(demand: MemoryDemand, rows: int) -> tuple[int, str]:
    if not demand.state_bytes:
        return 0, ""
    needed = rows * demand.slots_per_request
    least = demand.bytes_of(rows=rows, pages=rows, window_pages=demand.window_pages(rows), slots=0)
    affordable = (demand.kv_cache_bytes - least) // demand.state_bytes - 1
    configured = demand.max_mamba_cache_size
    if configured is not None:
        wanted = effective_mamba_size(configured, rows, demand.slots_per_request - 1)
        useful = max(needed, _useful_slots(demand, rows))
        if wanted > useful and useful <= affordable:
            return useful, f"--max-mamba-cache-size {configured}, lowered: {_why_useful(demand)}"
        if wanted > affordable:
            in_all = human_bytes(demand.kv_cache_bytes)
            return (
                affordable,
                f"--max-mamba-cache-size {configured}, lowered: {in_all} in all",
            )
        if wanted > configured:
            return wanted, f"--max-mamba-cache-size {configured}, raised to what {rows} requests need"
        return wanted, f"--max-mamba-cache-size {configured}"
    share, useful = _shared_slots(demand, rows), _useful_slots(demand, rows)
    slots = min(max(needed, min(share, useful)), affordable)
    reasons = {
        needed: f"what {rows} requests need",
        share: _why_share(demand),
        useful: _why_useful(demand),
        affordable: f"all but what {rows} requests need otherwise",
    }
    return slots, reasons[slots]


def _why_useful(demand: MemoryDemand) -> str:
    return f"more could not be of use beside the KV: one for every {_spacing(demand)} tokens"


def _why_share(demand: MemoryDemand) -> str:
    if not _has_tokens(demand):
        return "no layer keeps KV"
    return f"{demand.mamba_full_memory_ratio:g} times the memory of KV (--mamba-full-memory-ratio)"


def _has_tokens(demand: MemoryDemand) -> bool:
    return demand.kv_bytes_per_token + demand.window_bytes_per_token > 0


def _spacing(demand: MemoryDemand) -> int:
    return max(demand.page_size, _STATE_SPACING_TOKENS)


def _useful_slots(demand: MemoryDemand, rows: int) -> int:
    """The running requests', and as many cached states as the KV beside them could be resumed at."""
    running = rows * demand.slots_per_request
    if not demand.radix_cache:
        return running
    left = demand.kv_cache_bytes - running * demand.state_bytes
    per_state = _spacing(demand) * demand.kv_bytes_per_token + demand.state_bytes
    by_memory = left // per_state
    tokens = demand.max_total_tokens
    return running + max(0, by_memory if tokens is None else min(by_memory, ceil_div(tokens, _spacing(demand))))


def _num_pages(demand: MemoryDemand, rows: int, slots: int) -> tuple[int, int, str]:
    """KV pages and window pages from what rows and states leave, and what limits the first."""
    used = demand.row_bytes(rows, demand.possible_context) + ((slots + 1) * demand.state_bytes if slots else 0)
    # A padding page of each kind.
    left = demand.kv_cache_bytes - used - demand.page_bytes - demand.window_page_bytes
    ratio = round(demand.swa_full_tokens_ratio * _PARTS)
    if demand.page_bytes:
        pages, why = _kv_pages(demand, left, ratio, demand.window_pages(rows))
    else:
        pages, ratio = _empty_pages(demand, rows, slots), _PARTS
        why = "no layer keeps KV of all tokens: as many as requests and cached prefixes can use"
    if demand.most_pages is not None and demand.most_pages <= pages:
        pages, why = demand.most_pages, f"--max-total-tokens {demand.max_total_tokens}"
    if not demand.window_page_bytes:
        return pages, 0, why
    affordable = (left - pages * demand.page_bytes) // demand.window_page_bytes
    return pages, min(max(demand.window_pages(rows), pages * ratio // _PARTS), affordable), why


def _kv_pages(demand: MemoryDemand, left: int, ratio: int, least: int) -> tuple[int, str]:
    """By the ratio of windows to KV, in `_PARTS`, unless that would leave fewer than `least` window pages."""
    pages = left * _PARTS // (demand.page_bytes * _PARTS + ratio * demand.window_page_bytes)
    if pages * ratio >= least * _PARTS:
        return pages, f"{human_bytes(left)} hold that many"
    rest = left - least * demand.window_page_bytes
    return rest // demand.page_bytes, f"{human_bytes(rest)} beside the {least} window pages that requests need"


def _empty_pages(demand: MemoryDemand, rows: int, slots: int) -> int:
    per_request = ceil_div(demand.context_length, demand.page_size)
    cached = slots if demand.state_bytes else rows
    return max(per_request, min((rows + cached) * per_request, _MOST_EMPTY_PAGES))


def _with_lines(demand: MemoryDemand, budget: MemoryBudget, reasons: dict[str, str]) -> MemoryBudget:
    page = budget.page_size
    kv = human_bytes(demand.kv_bytes_per_token)
    lines = [
        BudgetLine("KV pages", _pages(budget.num_pages, page), reasons["pages"]),
        BudgetLine("KV cache", human_bytes(budget.kv_bytes), f"({budget.num_pages} + 1 padding) pages, {kv} per token"),
    ]
    if budget.num_window_pages:
        least = demand.window_pages(budget.max_running_requests)
        ratio = f"{demand.swa_full_tokens_ratio:g} of the KV pages (--swa-full-tokens-ratio)"
        why = f"what {budget.max_running_requests} requests need" if budget.num_window_pages == least else ratio
        size = f"{human_bytes(demand.window_bytes_per_token)} per token, {budget.window} tokens of window"
        lines += [
            BudgetLine("window pages", _pages(budget.num_window_pages, page), f"{why}; at least {least}"),
            BudgetLine(
                "window cache", human_bytes(budget.window_bytes), f"({budget.num_window_pages} + 1) pages, {size}"
            ),
        ]
    if budget.num_state_slots:
        size = f"({budget.num_state_slots} + 1 padding) slots of {human_bytes(demand.state_bytes)}"
        lines += [
            BudgetLine("state slots", str(budget.num_state_slots), reasons["slots"]),
            BudgetLine("slots per request", str(budget.slots_per_request), _why_slots(demand)),
            BudgetLine("states", human_bytes(budget.state_bytes), size),
        ]
    rows, context = budget.max_running_requests, budget.context_length
    lines += [
        BudgetLine("request rows", str(rows), reasons["rows"]),
        BudgetLine("page table", human_bytes(budget.row_bytes), f"({rows} + 1 padding) rows, {context} tokens each"),
        BudgetLine("context length", f"{context} tokens", reasons["context"]),
    ]
    return replace(budget, lines=tuple(lines))


def _pages(num_pages: int, page_size: int) -> str:
    return f"{num_pages} x {page_size} tokens = {num_pages * page_size} tokens"


def _why_slots(demand: MemoryDemand) -> str:
    parts = ["1 live"]
    if demand.num_tracking:
        parts.append(f"{demand.num_tracking} tracking")
    if demand.radix_cache:
        parts.append("1 cached")
    return " + ".join(parts)

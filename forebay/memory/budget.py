"""From bytes to KV pages, rows and the slots of other kinds of cache, before any weight is loaded (C4).

Too little memory for what was asked lowers the limits, with a reason for each, instead of refusing to start; only when
not a single request could run is it an error. `forebay plan` and the start-up report show the sum. What a kind needs
and what it can use is its own `KindDemand`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple

from forebay.base.errors import NotEnoughMemory
from forebay.base.units import ceil_div, human_bytes
from forebay.config.engine_config import MemoryOptions
from forebay.memory.kv_allocator import KV

_ROW_BYTES: Final = 64  # last token, length and sampling columns of one request row
# Pages of models that keep no KV cost nothing on the device and about 50 bytes each on the host.
_MOST_EMPTY_PAGES: Final = 1 << 20
_DRAFT_SHARE: Final = 8  # what verifying guesses needs is at most one part in so many: it holds no conversation
PARTS: Final = 1000  # ratios are taken to three places, so that the division is exact

Decided = tuple[int, str]
"""A number, and how it came about."""


class BudgetLine(NamedTuple):
    """One term of the sum, or one limit: what, how much, and how it came about."""

    item: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class KindDemand(ABC):
    """The demand of layers for one kind of cache beside full KV, in slots of `slot_bytes`, its padding slot not
    counted.

    With `per_page` they are so many for each KV page, in `PARTS`, once the requests have what they need; where it is
    None, `num_slots` decides before there are pages.
    """

    name: ClassVar[str]  # the kind's
    unit: ClassVar[str]  # what its slots are called
    settings: ClassVar[frozenset[str]]  # that bear on this kind alone
    sized_by: ClassVar[str] = ""  # that of them that gives the number of slots
    absent: ClassVar[str]  # said of a setting of a kind that no layer keeps

    slot_bytes: int
    per_page: int | None = None

    def bytes_of(self, num_slots: int) -> int:
        """With the padding slot, where there are any."""
        return (num_slots + 1) * self.slot_bytes if num_slots else 0

    @abstractmethod
    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        """Slots that so many requests need at least to run at once."""

    def most_requests(self, demand: MemoryDemand) -> Decided | None:
        """How many requests its share of the memory is enough for; None where nothing but `least` counts."""
        return None

    def num_slots(self, demand: MemoryDemand, rows: int, given: Mapping[str, int]) -> Decided:
        """Beside what other kinds were `given` already. Only asked where `per_page` is None."""
        raise AssertionError(f"{self.name}: neither so many for each page nor so many at all")

    def log_raised(self, budget: MemoryBudget) -> None:
        """Log a warning if the budget has more slots than were asked for. Most kinds are not asked for a number."""
        return

    @abstractmethod
    def lines(self, budget: MemoryBudget, reason: str) -> list[BudgetLine]:
        """`reason` is that of `num_slots`."""

    def num_read(self, demand: MemoryDemand) -> int:
        """Return the last tokens that a query reads, 0 for all."""
        return 0

    @abstractmethod
    def num_cached(self, budget: MemoryBudget, num_running: int, context: int) -> int:
        """How many conversations of `context` tokens the cache can go on from, beside so many that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand(MemoryOptions):
    """The memory to divide and the limits that were given. `kv_bytes_per_token` are those of all layers together, 0
    where none keeps all tokens. `max_total_tokens` None: as the memory has it. `pre_alloc_size` requests, whose prompts
    arrive while others run, hold as much as those; they are the first to have no room. A step may verify `width` tokens
    of a request, 1 where nothing is guessed: each has `logits_bytes` of logits and `inputs_bytes` that recurrent layers
    keep of it, and who guesses on the device keeps `draft_row_bytes` of a row."""

    kv_bytes_per_token: int
    width: int = 1
    logits_bytes: int = 0
    inputs_bytes: int = 0
    draft_row_bytes: int = 0
    pre_alloc_size: int = 0
    radix_cache: bool = True
    kinds: tuple[KindDemand, ...] = ()

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.kv_bytes_per_token

    @property
    def keeps_tokens(self) -> bool:
        """Whether any layer keeps something of every token, or of the last ones."""
        return self.page_bytes > 0 or any(kind.per_page is not None for kind in self.kinds)

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

    def row_bytes(self, num_requests: int, context_length: int) -> int:
        """4 bytes of page table per page of context, and the columns; one row more than can be used, for padding."""
        return (num_requests + 1) * (4 * ceil_div(context_length, self.page_size) + _ROW_BYTES)

    @property
    def draft_bytes(self) -> int:
        """Bytes that verifying draft tokens takes besides the caches; 0 without speculation."""
        rows, each = self.max_running_requests, self.logits_bytes + self.inputs_bytes
        return (rows * self.width * each + (rows + 1) * self.draft_row_bytes) if self.width > 1 else 0

    def least_bytes(self, num_requests: int, given: Mapping[str, int] | None = None) -> int:
        """Return the minimum bytes for `num_requests` concurrent requests: a page of KV each, and what else layers
        keep. Kinds that were `given` slots have those."""
        given = given or {}
        num_slots = [given.get(kind.name, kind.least(self, num_requests)) for kind in self.kinds]
        others = sum(kind.bytes_of(num) for kind, num in zip(self.kinds, num_slots, strict=True))
        return self.row_bytes(num_requests, self.possible_context) + (num_requests + 1) * self.page_bytes + others


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """How large the pools are, without the padding page, slot and row: of each kind of cache, full KV among them, its
    `num_slots`. `context_length` is the most tokens of a row; `pre_alloc_size` rows are there beside those of running
    requests."""

    page_size: int
    num_slots: Mapping[str, int]
    max_running_requests: int
    pre_alloc_size: int = 0
    context_length: int

    @property
    def num_pages(self) -> int:
        return self.num_slots[KV]

    @property
    def num_rows(self) -> int:
        return self.max_running_requests + self.pre_alloc_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget(PoolSizes):
    """How the memory that `demand` asks for is divided. Bytes are with padding, `num_bytes` by kind of cache."""

    demand: MemoryDemand
    num_bytes: Mapping[str, int]
    row_bytes: int
    lines: tuple[BudgetLine, ...] = ()

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def slot_bytes(self) -> dict[str, int]:
        """Bytes of one slot of each pool, in all layers together."""
        row_bytes = self.demand.row_bytes(1, self.context_length) - self.demand.row_bytes(0, self.context_length)
        kinds = {kind.name: kind.slot_bytes for kind in self.demand.kinds}
        return {KV: self.demand.page_bytes, "rows": row_bytes, **kinds}

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values()) + self.row_bytes + self.demand.draft_bytes


def divide_memory(demand: MemoryDemand) -> MemoryBudget:
    """Divide `demand.kv_cache_bytes`: first what requests need at least, then the kinds that do not follow the pages,
    then KV pages and those that do, by their ratio.

    Without `spare_cache` only as much of it as all requests at full context need. Raises NotEnoughMemory when not a
    single request could run.
    """
    budget = _divide(demand)
    if not demand.spare_cache and (least := _least_for_all(demand, budget.demand.width)) is not None:
        each = f"{demand.max_running_requests + demand.pre_alloc_size} requests of {demand.context_length} tokens"
        budget = _divide(replace(demand, kv_cache_bytes=least), f"{each} need no more")
    for kind in demand.kinds:
        kind.log_raised(budget)
    return budget


def _least_for_all(demand: MemoryDemand, width: int) -> int | None:
    """Return bytes with which as many requests as may run have their full context and steps verify `width` tokens, and
    with a page less they do not; None if `demand` has too few. Found by division, since kinds of cache divide by
    ratios, and from there page by page: with a slot less of another kind, a page more may have room."""

    def serves(num_bytes: int) -> bool:
        if num_bytes < demand.least_bytes(1):
            return False
        budget = _divide(replace(demand, kv_cache_bytes=num_bytes))
        rows, pages = budget.num_rows, budget.num_rows * ceil_div(demand.context_length, demand.page_size)
        enough = budget.num_pages >= min(pages, demand.most_pages or pages) or not demand.page_bytes
        return enough and budget.demand.width == width and rows == demand.max_running_requests + demand.pre_alloc_size

    low, high, page = 0, demand.kv_cache_bytes, max(demand.page_bytes, 1)
    if not serves(high):
        return None
    while high - low > page:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    while serves(high - page):
        high -= page
    return high


def _divide(demand: MemoryDemand, why_pages: str = "") -> MemoryBudget:
    _refuse_too_little(demand)
    asked, demand = demand, _no_wider_than_fits(demand)
    whole, demand = demand, replace(demand, kv_cache_bytes=demand.kv_cache_bytes - demand.draft_bytes)
    reasons = {"width": _why_so_wide(asked, whole)}
    rows, reasons["rows"] = _num_rows(demand)
    num_slots: dict[str, int] = {}
    for kind in demand.kinds:
        if kind.per_page is None:
            num_slots[kind.name], reasons[kind.name] = kind.num_slots(demand, rows, num_slots)
    num_slots[KV], reasons[KV] = _divide_pages(demand, rows, num_slots)
    reasons[KV] = why_pages or reasons[KV]
    context = min(demand.context_length, num_slots[KV] * demand.page_size)
    reasons["context"] = "the KV cache holds a request that long"
    if context < demand.context_length:
        reasons["context"] = f"lowered from {demand.context_length}: a request cannot be longer than the KV cache"
    budget = MemoryBudget(
        demand=whole,
        page_size=demand.page_size,
        num_slots=num_slots,
        max_running_requests=min(rows, demand.max_running_requests),
        pre_alloc_size=max(0, rows - demand.max_running_requests),
        context_length=context,
        num_bytes={KV: (num_slots[KV] + 1) * demand.page_bytes}
        | {kind.name: kind.bytes_of(num_slots[kind.name]) for kind in demand.kinds},
        row_bytes=demand.row_bytes(rows, context),
    )
    return replace(budget, lines=tuple(_lines(budget, reasons)))


def _refuse_too_little(demand: MemoryDemand) -> None:
    least = demand.least_bytes(1)
    if least <= demand.kv_cache_bytes:
        return
    parts = [f"two pages (one is padding) of {demand.page_size} tokens at {human_bytes(demand.kv_bytes_per_token)}"]
    parts += [
        f"{kind.least(demand, 1)} {kind.unit} (and a padding one) of {human_bytes(kind.slot_bytes)}"
        for kind in demand.kinds
    ]
    raise NotEnoughMemory(
        f"the caches have {human_bytes(demand.kv_cache_bytes)} and one request needs at least {human_bytes(least)}: "
        f"{', '.join(parts)}: raise --kv-cache-bytes or --mem-fraction-static, or lower --page-size"
    )


def _no_wider_than_fits(demand: MemoryDemand) -> MemoryDemand:
    """With no more tokens to verify than a share of the memory has room for, beside what one request needs."""
    room = min(demand.kv_cache_bytes // _DRAFT_SHARE, demand.kv_cache_bytes - demand.least_bytes(1))
    widths = (replace(demand, width=width) for width in range(demand.width, 1, -1))
    return next((narrower for narrower in widths if narrower.draft_bytes <= room), replace(demand, width=1))


def _why_so_wide(asked: MemoryDemand, settled: MemoryDemand) -> str:
    if settled.width == asked.width:
        return "the certain one, and guesses"
    share = f"{human_bytes(asked.kv_cache_bytes // _DRAFT_SHARE)} of {human_bytes(asked.kv_cache_bytes)} at most"
    what = "logits and recurrent inputs" if asked.inputs_bytes else "logits"
    each = human_bytes(asked.logits_bytes + asked.inputs_bytes)
    taken = f"{what} of {asked.max_running_requests} requests, {each} for a token"
    return f"lowered from {asked.width}: {taken}, have {share}: lower --max-running-requests or raise --kv-cache-bytes"


def _num_rows(demand: MemoryDemand) -> Decided:
    """As many requests as were asked for, those that do not run yet among them, and as their least needs allow."""
    asked = demand.max_running_requests + demand.pre_alloc_size
    one = demand.least_bytes(1)
    by_memory = 1 + (demand.kv_cache_bytes - one) // (demand.least_bytes(2) - one)
    needs = ["a page of its own"] if demand.page_bytes else []
    needs += [f"{kind.least(demand, 1) - kind.least(demand, 0)} {kind.unit}" for kind in demand.kinds]
    limits = [
        (asked, "--max-running-requests" + " and the extra slots of decode" * bool(demand.pre_alloc_size)),
        (by_memory, f"lowered from {asked}: each running request needs {', '.join(needs)}"),
    ]
    if demand.most_pages is not None:
        limits.append((demand.most_pages, f"lowered from {asked}: each running request needs a page of its own"))
    shares = [share for kind in demand.kinds if (share := kind.most_requests(demand))]
    limits += [(most, f"lowered from {asked}: {why}") for most, why in shares]
    return min(limits, key=lambda limit: limit[0])


def _divide_pages(demand: MemoryDemand, rows: int, num_slots: dict[str, int]) -> Decided:
    """KV pages, and what limits them, from what rows and `num_slots` leave; the kinds that follow the pages get their
    `num_slots`."""
    following = [kind for kind in demand.kinds if kind.per_page is not None]
    used = demand.row_bytes(rows, demand.possible_context)
    used += sum(kind.bytes_of(num_slots[kind.name]) for kind in demand.kinds if kind not in following)
    # A padding page of each kind.
    left = demand.kv_cache_bytes - used - demand.page_bytes - sum(kind.slot_bytes for kind in following)
    if demand.page_bytes:
        pages, why = _kv_pages(demand, left, rows, following)
    else:
        per_request, most = ceil_div(demand.context_length, demand.page_size), rows + (sum(num_slots.values()) or rows)
        pages = max(per_request, min(most * per_request, _MOST_EMPTY_PAGES))
        why = "no layer keeps KV of all tokens: as many as requests and cached prefixes can use"
    if demand.most_pages is not None and demand.most_pages <= pages:
        pages, why = demand.most_pages, f"--max-total-tokens {demand.max_total_tokens}"
    left -= pages * demand.page_bytes
    least = {kind.name: kind.least(demand, rows) for kind in following}
    for kind in following:
        affordable = left - sum(least[other.name] * other.slot_bytes for other in following if other is not kind)
        share = pages * (kind.per_page or 0) // PARTS if demand.page_bytes else pages
        least[kind.name] = num_slots[kind.name] = min(max(least[kind.name], share), affordable // kind.slot_bytes)
    return pages, why


def _kv_pages(demand: MemoryDemand, left: int, rows: int, following: list[KindDemand]) -> Decided:
    """By the ratios of `following` to KV, unless that would leave one of them fewer slots than requests need."""
    needs: list[str] = []
    while True:
        following_bytes = sum((kind.per_page or 0) * kind.slot_bytes for kind in following)
        pages = left * PARTS // (demand.page_bytes * PARTS + following_bytes)
        short = [kind for kind in following if pages * (kind.per_page or 0) < kind.least(demand, rows) * PARTS]
        if not short:
            beside = f"beside the {' and '.join(needs)} that requests need"
            return pages, f"{human_bytes(left)} {beside if needs else 'hold that many'}"
        following = [kind for kind in following if kind not in short]
        needs += [f"{kind.least(demand, rows)} {kind.unit}" for kind in short]
        left -= sum(kind.least(demand, rows) * kind.slot_bytes for kind in short)


def _lines(budget: MemoryBudget, reasons: Mapping[str, str]) -> list[BudgetLine]:
    pages, rows, context = budget.num_pages, budget.num_rows, budget.context_length
    kv = human_bytes(budget.demand.kv_bytes_per_token)
    lines = [
        BudgetLine("KV pages", in_tokens(pages, budget.page_size), reasons[KV]),
        BudgetLine("KV cache", human_bytes(budget.num_bytes[KV]), f"({pages} + 1 padding) pages, {kv} per token"),
    ]
    for kind in budget.demand.kinds:
        lines += kind.lines(budget, reasons.get(kind.name, ""))
    return [
        *lines,
        BudgetLine("request rows", str(rows), reasons["rows"]),
        BudgetLine("page table", human_bytes(budget.row_bytes), f"({rows} + 1 padding) rows, {context} tokens each"),
        BudgetLine("context length", f"{context} tokens", reasons["context"]),
        *_draft_lines(budget.demand, reasons["width"]),
    ]


def _draft_lines(demand: MemoryDemand, reason: str) -> list[BudgetLine]:
    """Nothing where nobody asked for guesses."""
    if not demand.logits_bytes:
        return []
    rows, lines = demand.max_running_requests, [BudgetLine("tokens verified per request", str(demand.width), reason)]
    if demand.width > 1:
        for item, each in (("verify logits", demand.logits_bytes), ("verify inputs", demand.inputs_bytes)):
            why = f"{rows} requests, {demand.width} tokens each, {human_bytes(each)} per token"
            lines += [BudgetLine(item, human_bytes(rows * demand.width * each), why)] if each else []
        if kept := (rows + 1) * demand.draft_row_bytes:
            why = f"({rows} + 1 padding) rows of {human_bytes(demand.draft_row_bytes)}"
            lines.append(BudgetLine("draft states", human_bytes(kept), why))
    return lines


def in_tokens(num_pages: int, page_size: int) -> str:
    """Format a number of pages as "pages x size = tokens", for logs."""
    return f"{num_pages} x {page_size} tokens = {num_pages * page_size} tokens"

"""From bytes to KV pages, rows and the slots of other kinds of cache, before any weight is loaded (C4).

Too little memory for what was asked lowers the limits, with a reason for each, instead of refusing to start; only when
not a single request could run is it an error. `forebay plan` and the start-up report show the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from forebay.base.errors import NotEnoughMemory
from forebay.base.units import ceil_div, human_bytes
from forebay.memory.budget import (
    LEAST_CONTEXT,
    PARTS,
    BudgetLine,
    Decided,
    KindDemand,
    MemoryBudget,
    MemoryDemand,
    in_tokens,
)
from forebay.memory.kv_allocator import KV

# Pages of models that keep no KV cost nothing on the device and about 50 bytes each on the host.
_MOST_EMPTY_PAGES: Final = 1 << 20
_DRAFT_SHARE: Final = 8  # what verifying guesses needs is at most one part in so many: it holds no conversation
# If one request cannot have its full context, further requests shorten that context by at most one part in so many: a
# server of one request at a time helps few, and a context of a few tokens nobody.
_OTHERS_SHARE: Final = 8


def divide_memory(demand: MemoryDemand) -> MemoryBudget:
    """Divide `demand.kv_cache_bytes`.

    The full context of one request comes first, then as many requests as fit. The kinds that do not follow the pages
    are next, then KV pages and the kinds that do, by their ratio.

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
    asked, fitting = demand, _for_requests_beside_context(demand)
    whole = _no_wider_than_fits(fitting)
    demand = _without_drafts(whole)
    reasons = {"width": _why_so_wide(fitting, whole)}
    rows, reasons["rows"] = _num_rows(demand, asked)
    num_slots, why_slots = _independent_slots(demand, rows)
    reasons |= why_slots
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
        num_bytes=bytes_by_kind(demand, num_slots),
        row_bytes=demand.row_bytes(rows, context),
    )
    return replace(budget, lines=tuple(_lines(budget, reasons)))


def bytes_by_kind(demand: MemoryDemand, num_slots: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of `num_slots` of each kind of cache, with the padding slots."""
    kinds = {kind.name: kind.bytes_of(num_slots[kind.name]) for kind in demand.kinds}
    return {KV: (num_slots[KV] + 1) * demand.page_bytes} | kinds


def _refuse_too_little(demand: MemoryDemand) -> None:
    least = demand.least_bytes(1)
    if least <= demand.kv_cache_bytes:
        return
    parts = [f"two pages (one is padding) of {demand.page_size} tokens at {human_bytes(demand.kv_bytes_per_token)}"]
    parts += [
        f"{kind.least(demand, 1)} {kind.unit} (and a padding one) of {human_bytes(kind.slot_bytes)}"
        for kind in demand.kinds
    ]
    parts += [f"a hot buffer of {human_bytes(demand.hot_row_bytes)}"] if demand.hot_tokens else []
    raise NotEnoughMemory(
        f"the caches have {human_bytes(demand.kv_cache_bytes)} and one request needs at least {human_bytes(least)}: "
        f"{', '.join(parts)}: raise --kv-cache-bytes or --mem-fraction-static, or lower --page-size"
    )


def _no_wider_than_fits(demand: MemoryDemand) -> MemoryDemand:
    """With no more tokens to verify than a share of the memory has room for, beside what one request needs."""
    room = min(demand.kv_cache_bytes // _DRAFT_SHARE, demand.kv_cache_bytes - demand.least_bytes(1))
    widths = (replace(demand, width=width) for width in range(demand.width, 1, -1))
    return next((narrower for narrower in widths if narrower.draft_bytes <= room), replace(demand, width=1))


def _without_drafts(demand: MemoryDemand) -> MemoryDemand:
    return replace(demand, kv_cache_bytes=demand.kv_cache_bytes - demand.draft_bytes)


def _why_so_wide(asked: MemoryDemand, settled: MemoryDemand) -> str:
    if settled.width == asked.width:
        return "the certain one, and guesses"
    share = f"{human_bytes(asked.kv_cache_bytes // _DRAFT_SHARE)} of {human_bytes(asked.kv_cache_bytes)} at most"
    what = "logits and recurrent inputs" if asked.inputs_bytes else "logits"
    each = human_bytes(asked.logits_bytes + asked.inputs_bytes)
    taken = f"{what} of {asked.max_running_requests} requests, {each} for a token"
    return f"lowered from {asked.width}: {taken}, have {share}: lower --max-running-requests or raise --kv-cache-bytes"


def _num_rows(demand: MemoryDemand, wanted: MemoryDemand) -> Decided:
    """As many requests as `wanted` asked for, those that do not run yet among them, as leave one its context, and as
    their least needs allow."""
    asked = wanted.max_running_requests + wanted.pre_alloc_size
    one = demand.least_bytes(1)
    by_memory = 1 + (demand.kv_cache_bytes - one) // (demand.least_bytes(2) - one)
    pages = "a page" if demand.pages_at_least == 1 else f"{demand.pages_at_least} pages"
    needs = [f"{pages} of its own"] if demand.page_bytes else []
    needs += [f"a hot buffer of {human_bytes(demand.hot_row_bytes)}"] if demand.hot_tokens else []
    needs += [f"{kind.least(demand, 1) - kind.least(demand, 0)} {kind.unit}" for kind in demand.kinds]
    first = "more than a short context" if demand.requests_first else "one request's context"
    beside = demand.max_running_requests + demand.pre_alloc_size
    limits = [
        (asked, "--max-running-requests" + " and the extra slots of decode" * bool(demand.pre_alloc_size)),
        (beside, f"lowered from {asked}: {first} comes first; each running request needs {', '.join(needs)}"),
        (by_memory, f"lowered from {asked}: each running request needs {', '.join(needs)}"),
    ]
    if demand.most_pages is not None:
        limits.append((demand.most_pages, f"lowered from {asked}: each running request needs a page of its own"))
    shares = [share for kind in demand.kinds if (share := kind.most_requests(demand))]
    limits += [(most, f"lowered from {asked}: {why}") for most, why in shares]
    return min(limits, key=lambda limit: limit[0])


def _for_requests_beside_context(demand: MemoryDemand) -> MemoryDemand:
    """Return `demand` for as many requests as leave one of them its context, and have KV for all tokens of their
    windows: a window of 4,096 tokens never fills without KV for as many.

    Only hot buffers and kinds whose slots and KV pages share the memory are concerned. A row of any other model costs
    as good as nothing, or has a share of its own.
    """
    if not demand.page_bytes or not (demand.following or demand.hot_row_bytes):
        return demand
    low, high = 1, demand.max_running_requests + demand.pre_alloc_size
    read = max((kind.num_read(demand) for kind in demand.following), default=0)
    context, each = _pages_before_rows(demand), max(demand.pages_at_least, ceil_div(read, demand.page_size))
    while low < high:
        rows = (low + high + 1) // 2
        pages = rows * each
        enough = _pages_beside(_for_rows(demand, rows), rows) >= max(context, min(pages, demand.most_pages or pages))
        low, high = (rows, high) if enough else (low, rows - 1)
    return _for_rows(demand, low)


def _for_rows(demand: MemoryDemand, rows: int) -> MemoryDemand:
    running = min(rows, demand.max_running_requests)
    return replace(demand, max_running_requests=running, pre_alloc_size=rows - running)


def _pages_before_rows(demand: MemoryDemand) -> int:
    """Return the KV pages of one request that are reserved before a second one has a row."""
    full, alone = demand.full_pages, _pages_beside(_for_rows(demand, 1), 1)
    pages = full if alone >= full else alone - alone // _OTHERS_SHARE
    return min(pages, ceil_div(LEAST_CONTEXT, demand.page_size)) if demand.requests_first else pages


def _pages_beside(demand: MemoryDemand, rows: int) -> int:
    """Return the most KV pages beside drafts, and what `rows` requests need of all other kinds."""
    return _most_pages(_without_drafts(_no_wider_than_fits(demand)), rows)


def _independent_slots(demand: MemoryDemand, rows: int) -> tuple[dict[str, int], dict[str, str]]:
    """Return the slots of the kinds that do not follow the pages, and the reasons."""
    num_slots: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for kind in demand.kinds:
        if kind.per_page is None:
            num_slots[kind.name], reasons[kind.name] = kind.num_slots(demand, rows, num_slots)
    return num_slots, reasons


def _left_for_pages(demand: MemoryDemand, rows: int, num_slots: Mapping[str, int]) -> int:
    """Return the bytes of KV pages and of the kinds that follow them, without a padding page of each."""
    used = demand.row_bytes(rows, demand.possible_context)
    used += sum(kind.bytes_of(num_slots[kind.name]) for kind in demand.kinds if kind.per_page is None)
    return demand.kv_cache_bytes - used - demand.page_bytes - sum(kind.slot_bytes for kind in demand.following)


def _most_pages(demand: MemoryDemand, rows: int) -> int:
    """Return the most KV pages beside what `rows` requests need of all other kinds."""
    left = _left_for_pages(demand, rows, _independent_slots(demand, rows)[0])
    least = sum(kind.least(demand, rows) * kind.slot_bytes for kind in demand.following)
    return max(0, left - least) // demand.page_bytes


def _divide_pages(demand: MemoryDemand, rows: int, num_slots: dict[str, int]) -> Decided:
    """KV pages, and what limits them, from what rows and `num_slots` leave; the kinds that follow the pages get their
    `num_slots`."""
    following, left = demand.following, _left_for_pages(demand, rows, num_slots)
    if demand.page_bytes:
        pages, why = _kv_pages(demand, left, rows, following)
        if pages < (context := min(demand.full_pages, _most_pages(demand, rows))):
            pages, why = context, "one request's context comes before what other kinds have beyond the least"
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


def _pages_by_ratio(demand: MemoryDemand, num_bytes: int, following: Sequence[KindDemand]) -> int:
    """Return the KV pages for which `num_bytes` suffice, with the slots of `following` by their ratios to KV."""
    following_bytes = sum((kind.per_page or 0) * kind.slot_bytes for kind in following)
    return num_bytes * PARTS // (demand.page_bytes * PARTS + following_bytes)


def _kv_pages(demand: MemoryDemand, left: int, rows: int, following: Sequence[KindDemand]) -> Decided:
    """Divide `left` bytes by the ratios of `following` to KV. A kind of which requests need more slots gets those."""
    needs: list[str] = []
    while True:
        pages = _pages_by_ratio(demand, left, following)
        short = [kind for kind in following if pages * (kind.per_page or 0) < kind.least(demand, rows) * PARTS]
        if not short:
            beside = f"beside the {' and '.join(needs)} that requests need"
            return pages, f"{human_bytes(left)} {beside if needs else 'hold that many'}"
        following = [kind for kind in following if kind not in short]
        needs += [f"{kind.least(demand, rows)} {kind.unit}" for kind in short]
        left -= sum(kind.least(demand, rows) * kind.slot_bytes for kind in short)


def _lines(budget: MemoryBudget, reasons: Mapping[str, str]) -> list[BudgetLine]:
    pages, rows, context = budget.num_pages, budget.num_rows, budget.context_length
    kv, hot_bytes = human_bytes(budget.demand.kv_bytes_per_token), (rows + 1) * budget.demand.hot_row_bytes
    lines = [
        BudgetLine("KV pages", in_tokens(pages, budget.page_size), reasons[KV]),
        BudgetLine("KV cache", human_bytes(budget.num_bytes[KV]), f"({pages} + 1 padding) pages, {kv} per token"),
    ]
    for kind in budget.demand.kinds:
        lines += kind.lines(budget, reasons.get(kind.name, ""))
    return [
        *lines,
        BudgetLine("request rows", str(rows), reasons["rows"]),
        BudgetLine(
            "page table", human_bytes(budget.row_bytes - hot_bytes), f"({rows} + 1 padding) rows, {context} tokens each"
        ),
        BudgetLine("context length", f"{context} tokens", reasons["context"]),
        *_draft_lines(budget.demand, reasons["width"]),
    ]


def _draft_lines(demand: MemoryDemand, reason: str) -> list[BudgetLine]:
    """Return the lines about verification; none without speculative decoding."""
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

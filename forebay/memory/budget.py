"""From bytes to pages and rows, before any weight is loaded.

Too little memory for what was asked lowers the limits, with a reason for each, instead of refusing to start; only when
not a single page fits is it an error. The report shows the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div, human_bytes

_ROW_BYTES = 64  # last token, length and sampling columns of one request row


class BudgetLine(NamedTuple):
    """One term of the sum, or one limit: what, how much, and how it came about."""

    item: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How the cache memory is divided; `num_pages` and `max_running_requests` without the padding page and row."""

    page_size: int
    num_pages: int
    max_running_requests: int
    context_length: int
    kv_bytes: int
    row_bytes: int
    lines: tuple[BudgetLine, ...]

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.row_bytes


def divide_memory(
    *,
    cache_bytes: int,
    kv_bytes_per_token: int,
    page_size: int,
    max_total_tokens: int,
    max_running_requests: int,
    context_length: int,
) -> MemoryBudget:
    """Divide `cache_bytes` into KV pages and request rows.

    Rows cost `4 bytes x pages per row` each for the page table plus a few columns; the rest is pages. Both have one
    more than can be used: the padding row and page. `max_total_tokens` and `max_running_requests` are upper limits.
    Raises ConfigError when not a single page fits.
    """
    page_bytes = page_size * kv_bytes_per_token
    affordable = cache_bytes // page_bytes - 1
    if affordable < 1:
        raise ConfigError(
            f"the KV cache has {human_bytes(cache_bytes)} and needs at least {human_bytes(2 * page_bytes)}: two pages "
            f"(one is padding) of {page_size} tokens at {human_bytes(kv_bytes_per_token)} each: raise "
            "--kv-cache-bytes or --mem-fraction-static, or lower --page-size"
        )
    wanted = ceil_div(max_total_tokens, page_size)
    rows = min(max_running_requests, affordable, wanted)
    row_bytes = _bytes_of_rows(rows, context_length, page_size)
    num_pages = min(wanted, max(1, (cache_bytes - row_bytes) // page_bytes - 1))
    rows = min(rows, num_pages)
    context = min(context_length, num_pages * page_size)
    row_bytes = _bytes_of_rows(rows, context, page_size)
    kv_bytes = (num_pages + 1) * page_bytes
    pages_why, rows_why, context_why = f"--max-total-tokens {max_total_tokens}", "--max-running-requests", "as asked"
    if num_pages < wanted:
        pages_why = f"{human_bytes(cache_bytes)} hold that many; {wanted * page_size} were allowed"
    if rows < max_running_requests:
        rows_why = f"lowered from {max_running_requests}: each running request needs a page of its own"
    if context < context_length:
        context_why = f"lowered from {context_length}: a request cannot be longer than the KV cache"
    sum_why = f"({num_pages} + 1 padding) pages x {page_size} tokens x {human_bytes(kv_bytes_per_token)} per token"
    return MemoryBudget(
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=rows,
        context_length=context,
        kv_bytes=kv_bytes,
        row_bytes=row_bytes,
        lines=(
            BudgetLine("KV pages", f"{num_pages} x {page_size} tokens = {num_pages * page_size} tokens", pages_why),
            BudgetLine("KV cache", human_bytes(kv_bytes), sum_why),
            BudgetLine("request rows", str(rows), rows_why),
            BudgetLine("page table", human_bytes(row_bytes), f"({rows} + 1 padding) rows, {context} tokens each"),
            BudgetLine("context length", f"{context} tokens", context_why),
        ),
    )


def _bytes_of_rows(rows: int, context_length: int, page_size: int) -> int:
    return (rows + 1) * (4 * ceil_div(context_length, page_size) + _ROW_BYTES)

"""The memory that caches are asked for, and how it is divided: the values before and after `memory.division`.

What a kind of cache needs and what it can use is its own `KindDemand`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from forebay.base.units import ceil_div
from forebay.config.engine_config import MemoryOptions
from forebay.memory.kv_allocator import KV

_ROW_BYTES: Final = 64  # last token, length and sampling columns of one request row
LEAST_CONTEXT: Final = 2048  # tokens: in fewer, a system prompt and one question do not have an answer
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

    With `per_page` they are so many for each KV page, in `PARTS`, once the requests have what they need; if it is
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
        """Return the bytes of `num_slots` slots and of the padding slot, 0 for none."""
        return (num_slots + 1) * self.slot_bytes if num_slots else 0

    @abstractmethod
    def least(self, demand: MemoryDemand, num_requests: int) -> int:
        """Return the minimum number of slots for `num_requests` concurrent requests."""

    def most_requests(self, demand: MemoryDemand) -> Decided | None:
        """How many requests its share of the memory is enough for; None where nothing but `least` counts."""
        return None

    def num_slots(self, demand: MemoryDemand, rows: int, given: Mapping[str, int]) -> Decided:
        """Beside what other kinds were `given` already. Only asked where `per_page` is None."""
        raise AssertionError(f"{self.name}: a number of slots is needed, for each page or in total")

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
        """Return how many conversations of `context` tokens can be resumed from the cache, beside `num_running`
        requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand(MemoryOptions):
    """The memory to divide and the limits that were given. `kv_bytes_per_token` are those of all layers together, 0
    where none keeps all tokens. `max_total_tokens` None: as the memory has it. `pre_alloc_size` requests, whose prompts
    arrive while others run, hold as much as those; they are the first to have no room. A step may verify `width` tokens
    of a request, 1 where nothing is guessed: each has `logits_bytes` of logits and `inputs_bytes` that recurrent layers
    keep of it, and who guesses on the device keeps `draft_row_bytes` of a row. With HiSparse a row has a hot buffer of
    `hot_tokens` tokens and `hot_row_bytes`. `host_bytes_per_token` are none of this memory: they are in a file, or
    beside a GPU's."""

    kv_bytes_per_token: int
    host_bytes_per_token: int = 0
    hot_tokens: int = 0
    hot_row_bytes: int = 0
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
    def whole_page_bytes(self) -> int:
        """Bytes of a page in all memories together: what a copy of it takes."""
        return self.page_size * (self.kv_bytes_per_token + self.host_bytes_per_token)

    @property
    def following(self) -> tuple[KindDemand, ...]:
        """The kinds with slots by the number of KV pages."""
        return tuple(kind for kind in self.kinds if kind.per_page is not None)

    @property
    def full_pages(self) -> int:
        """Pages of KV of one request with as many tokens as it may have."""
        return min(ceil_div(self.context_length, self.page_size), self.most_pages or sys.maxsize)

    @property
    def keeps_tokens(self) -> bool:
        """Whether any layer keeps something of every token, or of the last ones."""
        return self.page_bytes > 0 or bool(self.following)

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
        return (num_requests + 1) * (4 * ceil_div(context_length, self.page_size) + _ROW_BYTES + self.hot_row_bytes)

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
        page_bytes = (num_requests * self.pages_at_least + 1) * self.page_bytes
        return self.row_bytes(num_requests, self.possible_context) + page_bytes + others

    @property
    def pages_at_least(self) -> int:
        """Pages of KV that each request has at least: with fewer than in its hot buffer, that would save nothing."""
        return max(1, ceil_div(min(self.hot_tokens, self.possible_context), self.page_size))


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
        return {KV: self.demand.whole_page_bytes, "rows": row_bytes, **kinds}

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values()) + self.row_bytes + self.demand.draft_bytes


def in_tokens(num_pages: int, page_size: int) -> str:
    """Format a number of pages as "pages x size = tokens", for logs."""
    return f"{num_pages} x {page_size} tokens = {num_pages * page_size} tokens"

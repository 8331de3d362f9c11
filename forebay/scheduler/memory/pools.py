"""The pools of one engine: rows, KV pages, other kinds of cache, the prefix cache, pictures and adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from forebay.base.units import ceil_div
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.adapters import Adapters
from forebay.memory.ghosts import Ghosts
from forebay.memory.holding import Allocation, RowTable, Steps
from forebay.memory.kinds.build import make_kinds, make_rows
from forebay.memory.kinds.kind import Kind
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.pictures import COUNTERS as OF_PICTURES
from forebay.memory.pictures import Pictures
from forebay.memory.radix_cache import RadixCache
from forebay.memory.slots import LOADING, NO_IDS, Holder, Ids, Slots
from forebay.requests.step_plan import HostCopy
from forebay.requests.transfers import Span
from forebay.scheduler.counters import zeros
from forebay.scheduler.memory.deferred import Deferred
from forebay.scheduler.step_draft import StepDraft


class Pools:
    """All memory of an engine, by pool, and how much of it is available.

    `table` has the quantities of each row, `deferred` the memory that was released and is not free yet, and `draft` the
    changes that the device receives with the next step.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.kv = PagedKvAllocator(config.num_pages, config.page_size, ledger=config.ledger)
        self.rows = make_rows(config)
        self.kinds = make_kinds(config, self.rows)
        self.cache = RadixCache(
            self.kv,
            config.page_size,
            policy=config.radix_eviction_policy,
            kinds=self.kinds,
            weights=config.tenants,
            most_retained=config.pinned_cache_fraction,
        )
        self.ghosts: Ghosts | None = None  # without a prefix cache
        if config.radix_cache:
            num_pages = {name: num_slots[self.kv.name] for name, num_slots in config.tiers.items()}
            self.ghosts = Ghosts(config.page_size, {"device": config.num_pages, **num_pages})
        self.table = RowTable(self.rows.slots.num_rows, config.page_size)
        self.steps = Steps()
        self.deferred = Deferred(self.steps, self.kv, self.rows, self.cache, self.kinds)
        self.pictures: Pictures | None = None  # without an encoder
        if config.pictures is not None:
            in_tiers = sum(num_slots[self.kv.name] for num_slots in config.tiers.values())
            num_tokens = (config.num_pages + in_tiers) * config.page_size
            self.pictures = Pictures(config.pictures, num_tokens, self.steps, self.cache.tenants, ledger=config.ledger)
        # The slots of a pool that loads from other tiers write; see `scheduler.memory.tiers`.
        self.loading: Callable[[Slots], Holder] = lambda slots: Holder(LOADING, NO_IDS)
        self.num_loading: Mapping[str, int] = {}  # of these, by kind
        self.adapters = Adapters(config.max_loras, self.deferred.free_holding, ledger=config.ledger)
        self.draft = StepDraft(1, self.rows, pictures=self.pictures)

    # -- what is available ----------------------------------------------------------------------------------------

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated now: free, or cached and not pinned."""
        return self.kv.num_free + self.cache.num_evictable

    @property
    def usable_pages(self) -> int:
        """Pages that a request could have if it were alone: all but the quarantined ones."""
        return self.kv.capacity - self.kv.num_quarantined

    @property
    def scarce(self) -> Kind | None:
        """The kind that one more request would lack, None for none. A kind lacks slots if it cannot give at once what
        an admission takes, with all that is locked staying, or cannot promise what the request may take later."""
        for kind in self.kinds.all:
            if kind.slots_per_request and kind.num_available < kind.slots_per_request:
                return kind
            if kind.reserve.per_row > self.num_unpromised(kind):
                return kind
        return None

    def num_unpromised(self, kind: Kind) -> int:
        """Return the slots of a kind beside those that rows in use were promised. Quarantined slots count as gone, as
        do those that loads from other tiers write, and those that other engines may access after `clear`. All other
        deferred slots are part of what their row was promised, which is deferred with them."""
        num_rows = self.rows.slots.capacity - self.rows.slots.num_free - self.deferred.num_reserved_rows
        gone = kind.slots.num_quarantined + self.deferred.num_reserved(kind) + self.num_loading.get(kind.name, 0)
        return kind.slots.capacity - gone - kind.reserve.in_flight - num_rows * kind.reserve.per_row

    def opens_page(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Return for each row whether its next token is the first of a page that it does not have."""
        opens: npt.NDArray[np.bool_] = self.table.kv_bound[rows] >= self.table.num_pages[rows] * self.page_size
        return opens

    def make_room(self, num_pages: int) -> None:
        """Evict cached pages until `num_pages` are free, or none can be evicted."""
        short = num_pages - self.kv.num_free
        if short > 0:
            self.cache.evict(short)

    # -- places of one request ------------------------------------------------------------------------------------

    def kv_places(self, allocation: Allocation, start: int, stop: int) -> dict[str, Span]:
        """Return the pages that hold the KV of a request's tokens from `start`, a multiple of the page size, to
        `stop`."""
        pages = self.rows.pages(allocation.row, start // self.page_size, ceil_div(stop, self.page_size))
        return {self.kv.name: Span(start=start, ids=pages)}

    def places(self, allocation: Allocation, start: int, kv_start: int) -> dict[str, Span]:
        """Return the places of all that layers keep of a request's tokens from `start` on, but of KV from `kv_start`
        on."""
        spans = self.kv_places(allocation, kv_start, allocation.kv_len)
        pages = self.rows.pages(allocation.row, 0, ceil_div(allocation.kv_len, self.page_size))
        for kind in self.kinds.transferred:
            ids = kind.transfer_slots(allocation, pages, start // self.page_size)
            at = (len(pages) - len(ids)) * self.page_size if kind.of_pages else 0
            spans[kind.name] = Span(start=at, ids=ids)
        return spans

    def host_copy(self, allocation: Allocation) -> HostCopy:
        """Return the slots to copy to the host, of all that layers keep of a request's first `kv_len` tokens."""
        pages = self.rows.pages(allocation.row, 0, ceil_div(allocation.kv_len, self.page_size))
        slots = {kind.name: kind.transfer_slots(allocation, pages) for kind in self.kinds.transferred}
        return HostCopy(request_id=allocation.id, slots={self.kv.name: pages, **slots})

    # -- all of them ----------------------------------------------------------------------------------------------

    def clear(self, *, released: bool = False) -> None:
        """Free all slots and drop the prefix cache, whatever the ledgers say. With `released`, later misses report
        that the cache was released."""
        self.deferred.clear()
        self.adapters.clear()
        if self.pictures is not None:
            self.pictures.clear()
        self.cache.clear(released=released)
        if self.ghosts is not None:
            self.ghosts.clear()
        self.kv.clear()
        self.rows.clear()
        self.table.clear()

    @property
    def all(self) -> list[tuple[Slots, int]]:
        """Every pool with a ledger by request, and how many of its slots the prefix cache has."""
        found: list[tuple[Slots, int]] = [(self.kv, self.cache.num_pages), (self.rows.slots, 0)]
        return [*found, *((kind.slots, kind.num_cached) for kind in reversed(list(self.kinds)))]

    @property
    def num_cached(self) -> dict[str, int]:
        """Slots that the prefix cache has, by kind."""
        return {self.kv.name: self.cache.num_pages, **{kind.name: kind.num_cached for kind in self.kinds}}

    def cached(self) -> dict[str, Ids]:
        """Return the slots that nodes of the prefix cache hold, by kind."""
        nodes = [*self.cache.index.nodes()]
        ids = {self.kv.name: self.cache.holder().ids, **{kind.name: NO_IDS for kind in self.kinds}}
        return ids | {kind.name: kind.cached(nodes).ids for kind in self.kinds.attached}

    def cached_in(self, slots: Slots) -> Ids:
        """Return the slots of one pool that nodes of the prefix cache hold."""
        if slots is self.kv:
            return self.cache.holder().ids
        return next(
            (kind.cached(self.cache.index.nodes()).ids for kind in self.kinds.attached if kind.slots is slots), NO_IDS
        )

    def count(self, totals: Mapping[str, Ids]) -> bool:
        """Record what kinds of cache have counted on the device, by kind. Return whether the step loaded tokens into
        hot buffers."""
        counted = [kind.count(totals[kind.name]) for kind in self.kinds.device_counting if kind.name in totals]
        return any(counted)

    @property
    def counters(self) -> dict[str, float]:
        """The counters of the pools and of the prefix cache."""
        counted: dict[str, float] = {
            "evicted_pages": self.cache.num_evicted_pages,
            "prefixes_given_up": self.cache.retention.num_given_up,
            "ledger_violations": sum(slots.num_violations for slots, _ in self.all),
        }
        for kind in self.kinds.counting:
            counted |= kind.counters
        return counted | (zeros(OF_PICTURES) if self.pictures is None else self.pictures.counters)

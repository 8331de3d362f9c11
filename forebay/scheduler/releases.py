"""How rows, pages and what else requests hold come back: when nobody can touch them any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.adapters import Adapters
from forebay.memory.holding import Allocation, DeferredFree, Holding, RowTable, Steps, Transfer
from forebay.memory.kinds.build import make_kinds, make_rows
from forebay.memory.kinds.kind import Kind
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.miss_reason import MissReason
from forebay.memory.pictures import COUNTERS as OF_PICTURES
from forebay.memory.pictures import Pictures
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Adoption, Pin
from forebay.memory.slots import NO_IDS, NO_OWNER, NO_SLOT, Ids, Slots, as_ids
from forebay.requests.request import Request
from forebay.requests.step_plan import StepPlan, TokenLogprob
from forebay.scheduler.counters import zeros
from forebay.scheduler.offload import Offloaded
from forebay.scheduler.step_draft import StepDraft


class Left(NamedTuple):
    """Slots by kind of cache that other engines may touch until `ticket` is open, each once. They are booked for one
    request, whosever they were."""

    ticket: Transfer
    request_id: int
    ids: Mapping[str, Ids]


class Releases:
    """Rows, KV pages, prefix cache and the other kinds of cache of one engine, and how they come back.

    What each request holds is its `Allocation`. What a step in flight may still write is not released: it waits for the
    commit of the last step launched before it was let go. What another engine may still read or write waits for that,
    too, however long it takes (C22).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.kv = PagedKvAllocator(config.num_pages, config.page_size, ledger=config.ledger)
        self.offloaded = Offloaded(config.kinds)
        self.rows = make_rows(config)
        self.kinds = make_kinds(config, self.rows)
        # When nothing is found.
        self.nothing_resumable = {kind.name: 0 for kind in self.kinds if kind.missing is not MissReason.NONE}
        self.at_ends = any(kind.at_ends for kind in self.kinds)  # whether it matters where prompts part
        self.cache = RadixCache(
            self.kv,
            config.page_size,
            policy=config.radix_eviction_policy,
            kinds=self.kinds,
            weights=config.tenants,
        )
        self.table = RowTable(self.rows.slots.num_rows, config.page_size)
        self.steps = Steps()
        self.deferred: list[DeferredFree] = []  # what has been let go of and is not released yet
        self._aside: list[DeferredFree] = []  # of it, what `clear` found in use by other engines, and no request's
        self.pictures: Pictures | None = None  # without an encoder
        if config.pictures is not None:
            num_tokens = config.num_pages * config.page_size
            self.pictures = Pictures(config.pictures, num_tokens, self.steps, ledger=config.ledger)
        self.draft = StepDraft(1, self.rows, pictures=self.pictures)  # of the step that will be launched next
        self.adapters = Adapters(config.max_loras, self._let_adapter_go, ledger=config.ledger)
        self._reuse = config.radix_cache

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free, or cached and not pinned."""
        return self.kv.num_free + self.cache.num_evictable

    @property
    def usable_pages(self) -> int:
        """Pages that a request could have if it were alone: all but those that are set aside for good."""
        return self.kv.capacity - self.kv.num_quarantined

    def num_unpromised(self, kind: Kind) -> int:
        """Return the slots of a kind beside those that rows in use were promised. Quarantined slots count as gone, as
        do those that other engines may touch after `clear`. All other slots that wait for release are part of what the
        row was promised, which waits with them."""
        aside_rows = sum(freed.row != NO_SLOT for freed in self._aside)
        num_rows = self.rows.slots.capacity - self.rows.slots.num_free - aside_rows
        holdings = [holding for freed in self._aside for holding in freed.holdings if holding.kind is kind]
        gone = kind.slots.num_quarantined + sum(len(holding.ids) for holding in holdings)
        return kind.slots.capacity - gone - kind.reserve.in_flight - num_rows * kind.reserve.per_row

    @property
    def is_freeing(self) -> bool:
        """Whether rows or pages are free as soon as a step in flight has committed."""
        return any(freed.ticket is None for freed in self.deferred)

    @property
    def deferred_pages(self) -> int:
        """Pages that will be available when the steps in flight have committed; nobody counts on other engines."""
        return sum(freed.num_pages for freed in self.deferred if freed.ticket is None)

    # -- pictures -------------------------------------------------------------------------------------------------

    def leave_pictures(self, req: Request) -> None:
        """The request uses its pictures no longer."""
        if self.pictures is not None and req.pictures is not None:
            self.pictures.leave(req.pictures.encodings)

    def forget_pictures(self, reqs: Iterable[Request]) -> None:
        """Something was not finite for these requests: their pictures are encoded again."""
        for req in reqs:
            if self.pictures is not None and req.pictures is not None:
                self.pictures.forget(req.pictures.encodings)

    def without_pictures(self, req: Request, entries: list[TokenLogprob | None]) -> list[TokenLogprob | None]:
        """Return the log-probabilities of the request's prompt, with none at the tokens of pictures."""
        if self.pictures is not None and req.pictures is not None:
            for at in np.flatnonzero(self.pictures.stand_for(np.array(req.tokens[: len(entries)]))).tolist():
                entries[at] = None
        return entries

    # -- going out ------------------------------------------------------------------------------------------------

    def adopt(self, req: Request, num_committed: int, *, last: bool = False) -> None:
        """Let the cache have the whole pages among the first `num_committed` tokens, all written by completed steps, as
        far as a request could go on behind them; with `last` the request is leaving. Where the cache has such pages
        already, the request's row turns to those and its own copies are let go. Nothing behind the request's end is
        given, though draft tokens behind it may have been accepted."""
        if not self._reuse:
            return
        held = req.allocation
        ends: Sequence[int] = (min(num_committed, len(req.tokens)),)
        for kind in self.kinds:
            ends = kind.adoptable_ends(held, ends, self.steps.committed, last=last)
        for end in ends:
            start, stop = held.pin.num_pages, end // self.page_size
            if stop > start:
                own = self.rows.pages(held.row, start, stop)
                adoption = self.cache.extend_pin(held.pin, req.key(stop * self.page_size), own, req.id)
                if len(adoption.replaced):
                    self._turn_to(adoption, held, start, own)
            for kind in self.kinds:
                self._let_holding_go(kind.adopted(held, start, end), req.id)

    def _turn_to(self, adoption: Adoption, held: Allocation, start: int, own: Ids) -> None:
        """The cache had some of the request's `own` pages, from page `start` on: the row turns to those."""
        self.draft.write_row(held.row, start, adoption.replaced)
        if len(adoption.remapped):
            self.draft.remap(adoption.remapped)
        self._let_pages_go(held, own[: len(adoption.replaced)])

    def _let_pages_go(self, held: Allocation, pages: Ids) -> None:
        holdings = _present(kind.release_pages(pages) for kind in self.kinds)
        self._let_part_go(held, pages=pages, holdings=holdings)

    def _let_part_go(self, held: Allocation, *, row: int = NO_SLOT, pin: Pin | None = None, **parts: Any) -> None:
        """A transfer that is not `whole` touches pages alone, so nothing else has to wait for it."""
        ticket = held.ticket
        own: dict[str, Any] = {"fence": self.steps.fence(), "request_id": held.id}
        if ticket and not ticket.whole:
            self.let_go(DeferredFree(row=row, holdings=parts.pop("holdings"), **own))
            row = NO_SLOT
        self.let_go(DeferredFree(ticket=ticket, row=row, pin=pin, **parts, **own))

    def next_adoptable_end(self, held: Allocation, stop: int) -> int | None:
        """The first length, `stop` or more, to which the cache will be given what the request computes."""
        end = stop if held.kv_committed < stop else None
        for kind in self.kinds:
            end = kind.next_adoptable_end(held, stop, end)
        return end

    def is_finishing(self, req: Request) -> bool:
        """Whether more of a request that ends now can be cached if its release waits for its steps in flight."""
        return any(kind.is_finishing(req.allocation, len(req.tokens)) for kind in self.kinds)

    def checkpoints(self, pin: Pin) -> list[int]:
        """Lengths of a pinned prefix from which one can go on, where that is so at some ends of nodes only."""
        kinds = [kind for kind in self.kinds if kind.at_ends]
        lengths: list[int] = []
        node, num_pages = pin.node, pin.num_pages
        while kinds and node.parent is not None:
            if all(kind.num_kept(node) for kind in kinds):
                lengths.append(num_pages * self.page_size)
            node, num_pages = node.parent, num_pages - len(node.pages)
        return lengths[::-1]

    def release(self, req: Request, num_committed: int | None = None) -> None:
        """Take back all that the request holds, now or when no step in flight and no other engine can touch it.

        With `num_committed` the cache first adopts what completed steps wrote.
        """
        if num_committed is not None:
            self.adopt(req, num_committed, last=True)
        held = req.allocation
        own = self.rows.pages(held.row, held.pin.num_pages, held.num_pages)
        holdings = _present(kind.release_all(held) for kind in self.kinds)
        req.held = None
        self.table.move_out(held.row)
        self.draft.forget_row(held.row)
        self._let_part_go(held, row=held.row, pin=held.pin, pages=own, holdings=holdings)

    def _let_holding_go(self, holding: Holding | None, request_id: int) -> None:
        if holding is not None:
            self.let_go(DeferredFree(fence=self.steps.fence(), request_id=request_id, holdings=(holding,)))

    def _let_adapter_go(self, number: int, holding: Holding) -> None:
        self.let_go(DeferredFree(fence=self.steps.fence(), request_id=number, holdings=(holding,)))

    def let_go(self, freed: DeferredFree) -> None:
        """Release this, as soon as nobody can touch it."""
        if freed.is_free:
            self.take_back(freed)
        else:
            self.deferred.append(freed)

    def committed(self, plan: StepPlan, ends: Sequence[int], num_new: Sequence[int] | None) -> None:
        """Record that a step has completed, as all before it, and release what only it could write. `ends` are the
        lengths up to which it computed prompts. `num_new` ends with the number of new tokens of each decode; without
        it, each decode has one."""
        num = plan.num_extends
        decodes = plan.rows[num:]
        if num:
            self.table.commit(plan.rows[:num], np.array(ends, dtype=np.int64))
        if len(decodes):
            counts = np.array(num_new[-len(decodes) :] if num_new else [1] * len(decodes), dtype=np.int64)
            self.table.settle(decodes, plan.q_lens[num:] - 1, counts)
        self.steps.committed = plan.step
        if self.pictures is not None:
            for encode in plan.pictures.encodes:
                self.pictures.committed(plan.step, encode.picture, encode.tile, encode.last_layer)
        if self.deferred:
            self.take_back_what_is_free()

    def take_back_what_is_free(self) -> None:
        """Fences need not open in the order in which they were set."""
        at = 0
        while at < len(self.deferred):
            if self.deferred[at].is_free:
                self.take_back(self.deferred.pop(at))
            else:
                at += 1

    def take_back(self, freed: DeferredFree) -> None:
        """Return what a request released to its pools, once no step in flight can access it."""
        if len(freed.pages):
            self.kv.return_ids(freed.pages, freed.request_id)
        if freed.row != NO_SLOT:
            self.rows.free_row(freed.row)
        for holding in freed.holdings:
            holding.kind.return_slots(holding, freed.request_id)
        if self._aside:
            self._aside = [other for other in self._aside if other is not freed]
        if freed.pin is not None:
            self.cache.unpin(freed.pin)

    def start_over(self, reqs: Iterable[Request], ended: Iterable[Request], void: Sequence[StepPlan]) -> None:
        """Take back what everybody holds: of `reqs` what completed steps wrote is adopted, of `ended` nothing. The
        steps of the plans `void`, all those in flight, and what is planned since do not count."""
        for req in reqs:
            self.release(req, req.allocation.kv_committed)
        for req in ended:
            self.release(req)
        reads = self.draft.reads
        self._draft_anew(void, self.steps.committed)
        self.steps.committed = self.steps.launched
        self.take_back_what_is_free()
        for holding in reads:
            holding.kind.return_slots(holding, NO_OWNER)
        for kind in self.kinds:
            kind.start_over(self.draft)

    def _draft_anew(self, void: Sequence[StepPlan], committed: int) -> None:
        """Discard the changes of the steps of `void`, and of what was decided since."""
        drops = self.offloaded.start_over([*(plan.host for plan in void), self.draft], committed)
        if self.pictures is not None:
            self.pictures.start_over(number for plan in void for number in plan.pictures.drops)
        self.draft = StepDraft(self.steps.launched + 1, self.rows, drops, pictures=self.pictures)

    def clear(
        self, void: Sequence[StepPlan], left: Left | None = None, *, committed: int = -1, released: bool = False
    ) -> None:
        """Everything is free and nothing is cached, whatever the books said: nobody holds anything, and no step of the
        plans `void`, all those in flight, counts. But what other engines may touch, `left`, stays out of use,
        and of copies on the host those of steps up to `committed` stay. What was cached, and was `released`, is missed
        as such."""
        self._draft_anew(void, committed)
        self.deferred.clear()
        self._aside = []
        self.steps.committed = self.steps.launched
        self.adapters.clear()
        if self.pictures is not None:
            self.pictures.clear()
        self.cache.clear(released=released)
        self.kv.clear()
        self.rows.clear()
        self.table.clear()
        if left:
            self._set_aside(left)

    def keep_cached(self) -> dict[str, Ids]:
        """Nobody holds anything, and all is as after `clear` but what is cached: that stays in its places as far as
        copies of it fit into host memory, the least useful having gone, and is there for the next step. Its places, by
        kind."""
        kinds = {self.kv.name: 1, **{kind.name: int(kind.of_pages) for kind in self.kinds}}
        page_bytes = self.offloaded.bytes_of(kinds)
        while (excess := self.offloaded.bytes_of(self._num_cached) - self.offloaded.room) > 0:
            gone = self.cache.evict(1 if self.at_ends else max(1, excess // page_bytes), MissReason.RELEASED)
            assert gone, f"{self.cache.num_pages} cached pages are pinned by nobody"
        self.start_over([], [], [])
        if self.pictures is not None:
            self.pictures.clear()
        self.table.clear()
        nodes = [*self.cache.nodes()]
        return {self.kv.name: self.cache.holder().ids, **{kind.name: kind.cached(nodes).ids for kind in self.kinds}}

    @property
    def _num_cached(self) -> dict[str, int]:
        return {self.kv.name: self.cache.num_pages, **{kind.name: kind.num_cached for kind in self.kinds}}

    def _set_aside(self, left: Left) -> None:
        named = [kind for kind in self.kinds if kind.name in left.ids]
        self.kv.claim(left.ids[self.kv.name], left.request_id)
        holdings = [Holding(kind, left.ids[kind.name]) for kind in named if not kind.of_rows]
        for holding in holdings:
            holding.kind.slots.claim(holding.ids, left.request_id)
        rows = np.unique(np.concatenate([NO_IDS, *(left.ids[kind.name] for kind in named if kind.of_rows)]))
        self.rows.claim(rows)
        own: dict[str, Any] = {"fence": self.steps.fence(), "ticket": left.ticket, "request_id": left.request_id}
        self._aside = [DeferredFree(pages=left.ids[self.kv.name], holdings=holdings, **own)]
        self._aside += [DeferredFree(row=row, **own) for row in rows.tolist()]
        for freed in self._aside:
            self.let_go(freed)

    # -- checking -------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[tuple[Slots, int]]:
        """Every pool, and how many of its slots the prefix cache has."""
        found: list[tuple[Slots, int]] = [(self.kv, self.cache.num_pages), (self.rows.slots, 0)]
        return [*found, *((kind.slots, kind.num_cached) for kind in reversed(self.kinds))]

    def cached_in(self, slots: Slots) -> Ids:
        """The slots of a pool that nodes of the prefix cache hold."""
        if slots is self.kv:
            return self.cache.holder().ids
        return next((kind.cached(self.cache.nodes()).ids for kind in self.kinds if kind.slots is slots), NO_IDS)

    def waiting_in(self, slots: Slots) -> Iterator[tuple[DeferredFree, Ids]]:
        """Yield the slots of a pool that wait for their release."""
        for left in self.deferred:
            if slots is self.kv:
                yield left, left.pages
            elif slots is self.rows.slots:
                yield left, as_ids([left.row] if left.row != NO_SLOT else [])
            else:
                yield from ((left, holding.ids) for holding in left.holdings if holding.kind.slots is slots)

    def num_unfenced(self, slots: Slots) -> int:
        """Slots that nobody here waits for and another engine may still touch."""
        return sum(len(ids) for left, ids in self.waiting_in(slots) if left.ticket and left.ticket.ended)

    @property
    def counters(self) -> dict[str, float]:
        """The counters of the pools and of the cache."""
        counted: dict[str, float] = {
            "evicted_pages": self.cache.num_evicted_pages,
            "ledger_violations": sum(slots.num_violations for slots, _ in self.pools),
        }
        for kind in self.kinds:
            counted |= kind.counters
        return counted | (zeros(OF_PICTURES) if self.pictures is None else self.pictures.counters)


def _present(holdings: Iterable[Holding | None]) -> list[Holding]:
    return [holding for holding in holdings if holding is not None]

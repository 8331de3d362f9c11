"""How admitted requests come by what they hold (rows, pages, pins, and more by kind), and when it is given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from forebay.base.units import ceil_div
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.holding import DeferredFree, Holding, Residency, RowTable, Steps
from forebay.memory.kinds.build import make_kinds, make_rows
from forebay.memory.kinds.kind import Arrival, Kind
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Adoption, Match, Pin, no_match
from forebay.memory.slots import NO_IDS, NO_SLOT, NOBODY, Ids, Slots
from forebay.requests.request import Request
from forebay.requests.schedule_batch import Chunk, ScheduleBatch
from forebay.requests.step_plan import HostCopy, StepPlan
from forebay.scheduler.offload import Offloaded
from forebay.scheduler.step_draft import StepDraft


class Residencies:
    """Rows, KV pages, prefix cache and the other kinds of cache of one engine.

    What each request holds is its `Residency`. What a step in flight may still write is not released: it waits for the
    commit of the last step launched before it was let go.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.kv = PagedKvAllocator(config.num_pages, config.page_size, ledger=config.ledger)
        self.offloaded = Offloaded(config.kinds)
        self.rows = make_rows(config)
        self.kinds = make_kinds(config, self.rows)
        self.nothing_resumable = {kind.name: 0 for kind in self.kinds}  # when nothing is found
        self.at_ends = any(kind.at_ends for kind in self.kinds)  # whether it matters where prompts part
        self.cache = RadixCache(self.kv, config.page_size, policy=config.radix_eviction_policy, kinds=self.kinds)
        self.table = RowTable(self.rows.slots.num_rows, config.page_size)
        self.steps = Steps()
        self.deferred: list[DeferredFree] = []  # what has been let go of and is not released yet
        self.draft = StepDraft(1, self.rows)  # of the step that will be launched next
        self._reuse = config.radix_cache

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free, or cached and not pinned."""
        return self.kv.num_free + self.cache.num_evictable

    @property
    def usable_pages(self) -> int:
        """Pages that a request could have if it were alone: all but those that are set aside for good."""
        return self.kv.capacity - self.kv.num_quarantined

    @property
    def deferred_pages(self) -> int:
        """Pages that will be available when the steps in flight have committed."""
        return sum(freed.num_pages for freed in self.deferred)

    # -- coming in ------------------------------------------------------------------------------------------------

    def match(self, req: Request) -> Match:
        """What the cache has of the request's tokens; the last one is always computed, so it is never asked for."""
        if not self._reuse:
            return no_match(MissReason.DISABLED)
        if req.wants_prompt_logprobs:
            return no_match(MissReason.PROMPT_LOGPROBS)
        return self.cache.match(req.key(len(req.tokens) - 1), req.namespace)

    def pin(self, req: Request, match: Match) -> Pin:
        """Keep all that `match` found, until `unpin` or for as long as the request needs it."""
        pin = self.cache.pin(match, req.namespace, req.priority, req.author)
        if pin.num_pages:
            for kind in self.kinds:
                kind.lock(pin.node, match.pages)
        return pin

    def unpin(self, pin: Pin, match: Match) -> None:
        if pin.num_pages:
            for kind in self.kinds:
                kind.unlock(pin.node, match.pages)
        self.cache.unpin(pin)

    def computes_for(self, req: Request) -> bool:
        """Whether a step in flight still computes for a request that waits, or copies to the host what it had."""
        made_by = self.offloaded.made_by(req.id)
        return req.resume_after > self.steps.committed or self.steps.committed < made_by <= self.steps.launched

    @property
    def scarce(self) -> Kind | None:
        """The kind of which one more request cannot be given what it needs at once, with all that is locked staying."""
        for kind in self.kinds:
            if not kind.can_admit:
                return kind
        return None

    def admit(self, req: Request, match: Match, pin: Pin, num_pages: int, branches: Iterable[int] = ()) -> None:
        """Give the request a row, the `num_pages` that its known tokens still need and what else it needs, all or
        nothing; the pin is then its own. A request that was offloaded goes on from its host copy. `branches` are
        lengths at which other prompts part from its own.

        The caller has checked that there is enough: OutOfSlots here is a fault of ours.
        """
        held = Residency(self.table, req.id, pin, len(req.tokens))
        pages = NO_IDS
        try:
            self._make_room(num_pages)
            for kind in self.kinds:
                kind.make_room_to_admit()
            pages = self.kv.take_ids(num_pages, req.id)
            self.rows.alloc([held])
        except BaseException:
            self.kv.return_ids(pages, req.id)
            self.unpin(pin, match)
            raise
        req.held = held
        num_loaded = self.offloaded.num_tokens(req.id)
        self.table.move_in(
            held,
            max_kv_len=req.max_kv_len,
            num_pages=len(match.pages) + num_pages,
            kv_len=num_loaded or match.num_tokens,
            kv_committed=match.num_tokens,  # what comes back from the host is there when its step has completed
        )
        self.draft.write_row(held.row, 0, np.concatenate([match.pages, pages]))
        if self.kinds:
            arrival = Arrival(req.num_prompt, num_loaded > 0, req.resume_points, branches)
            for kind in self.kinds:
                kind.admit(held, arrival, self.draft)
        if num_loaded:
            self.offloaded.load(self._host_copy(held), self.draft)

    def _host_copy(self, held: Residency) -> HostCopy:
        """Of all that layers keep of the request's first `kv_len` tokens."""
        pages = self.rows.pages(held.row, 0, ceil_div(held.kv_len, self.page_size))
        slots = {kind.name: kind.slots_with(held, pages) for kind in self.kinds}
        return HostCopy(request_id=held.id, slots={self.kv.name: pages, **slots})

    def offload(self, held: Residency) -> bool:
        """Copy what a request that is about to leave has on the device to the host, if that is worth it."""
        return self.offloaded.save(self._host_copy(held), held.kv_len, self.draft)

    def slide(self, extending: Iterable[Request]) -> None:
        """Before chunks are cut: let go of what the chunks before have left behind."""
        if self.kinds:
            rows = np.array([req.residency.row for req in extending], dtype=np.int64)
            for kind in self.kinds:
                kind.slide(self.table, rows)

    def cut(self, req: Request, most: int) -> Chunk:
        """The request's next chunk, of at most so many tokens; it may be empty. Nothing is taken for it yet."""
        held = req.residency
        start = held.kv_len
        stop = min(held.extend_target, start + most)
        for kind in self.kinds:
            stop = kind.limit(held, stop)
        return Chunk(req, start, stop)

    def extend(self, chunk: Chunk) -> None:
        """The next step computes this chunk."""
        for kind in self.kinds:
            kind.extend(chunk.req.residency, chunk.stop, self.draft)
        self.draft.chunks.append(chunk)

    def decode(self, batch: ScheduleBatch, active: Ids | None) -> None:
        """The next step decodes the requests (at the indices `active`): one page more for each whose token opens one,
        and the batch is prepared."""
        rows = batch.req_pool_indices_cpu if active is None else batch.req_pool_indices_cpu[active]
        for kind in self.kinds:
            kind.slide(self.table, rows)
        growing = rows[self.opens_page(rows)]
        if len(growing):
            self._grow(growing, self.table.num_pages[growing])
        batch.prepare_for_decode(active)

    def add_drafts(self, rows: Ids, counts: Ids, draft_tokens: list[int]) -> bool:
        """Of these rows, which the next step decodes, it also verifies so many draft tokens each. False, and it
        verifies none, where pages are too few for that. `draft_tokens` are these tokens, where the host has them.
        """
        stops = ceil_div(self.table.kv_bound[rows] + counts, self.page_size)
        num_pages = self.table.num_pages[rows]
        missing = np.maximum(stops - num_pages, 0)
        if (total := int(missing.sum())) > self.available_pages:
            return False
        if total:
            before = np.repeat(np.cumsum(missing) - missing, missing)
            self._grow(np.repeat(rows, missing), np.repeat(num_pages, missing) + np.arange(total) - before)
        self.table.add_drafts(rows, counts)
        self.draft.num_drafts, self.draft.draft_tokens = counts, draft_tokens
        return True

    def give_back_unused(self, rows: Ids) -> bool:
        """Let go of pages of these rows, which decode, that were taken for draft tokens and stand behind that of the
        next token; whether there were any. Where only the device knows the length, none are."""
        needed = self.table.kv_bound[rows] // self.page_size + 1
        unused = (self.table.num_drafts[rows] == 0) & (self.table.num_pages[rows] > needed)
        for row, stop in zip(rows[unused].tolist(), needed[unused].tolist(), strict=True):
            held = self.table.resident(row)
            pages = self.rows.pages(row, stop, held.num_pages)
            self.rows.req_to_token[row, stop : held.num_pages] = NO_SLOT
            held.num_pages = stop
            self._let_pages_go(held, pages)
        return bool(unused.any())

    def _grow(self, rows: Ids, columns: Ids) -> None:
        """Give each of these rows, in which some may stand several times in a row, the page of that number."""
        self._make_room(len(rows))
        owners = self.table.request_id[rows]
        pages = self.kv.take_ids(len(rows), owners)
        self.draft.write_each(rows, columns, pages)
        self.table.num_pages[rows] = columns + 1
        for kind in self.kinds:
            kind.grow(pages, owners, self.draft)

    def launch(self, decodes: Ids, admitted: Sequence[Request]) -> StepPlan:
        """The plan of the draft, of which the decodes are in these rows. The next draft begins."""
        draft = self.draft
        for kind in self.kinds if len(decodes) else ():
            kind.decode(self.table, decodes, self.steps.committed, draft)
        plan = draft.freeze(decodes, admitted, self.kinds)
        self.steps.launched = draft.step
        self.draft = StepDraft(draft.step + 1, self.rows)
        for holding in draft.reads:
            self._let_holding_go(holding, NOBODY)
        return plan

    def opens_page(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Of each row, whether its next token is the first of a page that it does not have."""
        opens: npt.NDArray[np.bool_] = self.table.kv_bound[rows] >= self.table.num_pages[rows] * self.page_size
        return opens

    def _make_room(self, num_pages: int) -> None:
        short = num_pages - self.kv.num_free
        if short > 0:
            self.cache.evict(short)

    # -- going out ------------------------------------------------------------------------------------------------

    def adopt(self, req: Request, num_committed: int, *, last: bool = False) -> None:
        """Let the cache have the whole pages among the first `num_committed` tokens, all written by completed steps, as
        far as a request could go on behind them; with `last` the request is leaving. Where the cache has such pages
        already, the request's row turns to those and its own copies are let go. Nothing behind the request's end is
        given, though draft tokens behind it may have been accepted."""
        if not self._reuse:
            return
        held = req.residency
        ends: Sequence[int] = (min(num_committed, len(req.tokens)),)
        for kind in self.kinds:
            ends = kind.ends(held, ends, self.steps.committed, last=last)
        for end in ends:
            start, stop = held.pin.num_pages, end // self.page_size
            if stop > start:
                own = self.rows.pages(held.row, start, stop)
                adoption = self.cache.extend_pin(held.pin, req.key(stop * self.page_size), own, req.id)
                if len(adoption.replaced):
                    self._turn_to(adoption, held, start, own)
            for kind in self.kinds:
                self._let_holding_go(kind.adopted(held, start, end), req.id)

    def _turn_to(self, adoption: Adoption, held: Residency, start: int, own: Ids) -> None:
        """The cache had some of the request's `own` pages, from page `start` on: the row turns to those."""
        self.draft.write_row(held.row, start, adoption.replaced)
        if len(adoption.remapped):
            self.draft.remap(adoption.remapped)
        self._let_pages_go(held, own[: len(adoption.replaced)])

    def _let_pages_go(self, held: Residency, pages: Ids) -> None:
        holdings = _present(kind.let_go(pages) for kind in self.kinds)
        self.let_go(DeferredFree(fence=self.steps.fence(), request_id=held.id, pages=pages, holdings=holdings))

    def next_end(self, held: Residency, stop: int) -> int | None:
        """The first length, `stop` or more, to which the cache will be given what the request computes."""
        end = stop if held.kv_committed < stop else None
        for kind in self.kinds:
            end = kind.next_end(held, stop, end)
        return end

    def is_finishing(self, req: Request) -> bool:
        """Whether more of a request that ends now can be cached if its release waits for its steps in flight."""
        return any(kind.is_finishing(req.residency, len(req.tokens)) for kind in self.kinds)

    def release(self, req: Request, num_committed: int | None = None) -> None:
        """Take back all that the request holds, now or when no step in flight can touch it any more.

        With `num_committed` the cache first adopts what completed steps wrote.
        """
        if num_committed is not None:
            self.adopt(req, num_committed, last=True)
        held = req.residency
        own = self.rows.pages(held.row, held.pin.num_pages, held.num_pages)
        holdings = _present(kind.leave(held) for kind in self.kinds)
        req.held = None
        self.table.move_out(held.row)
        self.draft.forget_row(held.row)
        self.let_go(
            DeferredFree(
                fence=self.steps.fence(), request_id=req.id, row=held.row, pages=own, pin=held.pin, holdings=holdings
            )
        )

    def _let_holding_go(self, holding: Holding | None, request_id: int) -> None:
        if holding is not None:
            self.let_go(DeferredFree(fence=self.steps.fence(), request_id=request_id, holdings=(holding,)))

    def let_go(self, freed: DeferredFree) -> None:
        """Release this, as soon as its fence is open."""
        if freed.fence.is_open:
            self.take_back(freed)
        else:
            self.deferred.append(freed)

    def committed(self, plan: StepPlan, num_new: Ids) -> None:
        """This step, whose decodes have so many tokens more, and all before it have completed: what they wrote counts,
        and what only they could write is released."""
        num = plan.num_extends
        if num:
            self.table.commit(plan.rows[:num], plan.ends)
        if len(num_new):
            self.table.settle(plan.rows[num:], plan.q_lens[num:] - 1, num_new)
        self.steps.committed = plan.step
        self._take_back_what_is_free()

    def _take_back_what_is_free(self) -> None:
        """Fences need not open in the order in which they were set."""
        at = 0
        while at < len(self.deferred):
            if self.deferred[at].fence.is_open:
                self.take_back(self.deferred.pop(at))
            else:
                at += 1

    def take_back(self, freed: DeferredFree) -> None:
        if len(freed.pages):
            self.kv.return_ids(freed.pages, freed.request_id)
        if freed.row != NO_SLOT:
            self.rows.free_row(freed.row)
        for holding in freed.holdings:
            holding.kind.release(holding, freed.request_id)
        if freed.pin is not None:
            self.cache.unpin(freed.pin)

    def start_over(self, reqs: Iterable[Request], ended: Iterable[Request], void: Sequence[StepPlan]) -> None:
        """Take back what everybody holds: of `reqs` what completed steps wrote is adopted, of `ended` nothing. The
        steps of the plans `void`, all those in flight, and what is planned since do not count."""
        for req in reqs:
            self.release(req, req.residency.kv_committed)
        for req in ended:
            self.release(req)
        reads = self.draft.reads
        self._draft_anew(void, self.steps.committed)
        self.steps.committed = self.steps.launched
        self._take_back_what_is_free()
        for holding in reads:
            holding.kind.release(holding, NOBODY)
        for kind in self.kinds:
            kind.start_over(self.draft)

    def _draft_anew(self, void: Sequence[StepPlan], committed: int) -> None:
        """What the steps of `void` were to do, and what was decided since, does not count."""
        drops = self.offloaded.start_over([*(plan.host for plan in void), self.draft], committed)
        self.draft = StepDraft(self.steps.launched + 1, self.rows, drops)

    def clear(self, void: Sequence[StepPlan]) -> None:
        """Everything is free and nothing is cached, whatever the books said: nobody holds anything, and no step of the
        plans `void`, all those in flight, counts."""
        self._draft_anew(void, committed=-1)
        self.deferred.clear()
        self.steps.committed = self.steps.launched
        self.cache.clear()
        self.kv.clear()
        self.rows.clear()
        self.table.clear()

    # -- checking -------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[tuple[Slots, int]]:
        """Every pool, and how many of its slots the prefix cache has."""
        found: list[tuple[Slots, int]] = [(self.kv, self.cache.num_pages), (self.rows.slots, 0)]
        return [*found, *((kind.slots, kind.num_cached) for kind in reversed(self.kinds))]

    @property
    def counters(self) -> dict[str, float]:
        """What the pools and the cache have counted."""
        counted: dict[str, float] = {
            "evicted_pages": self.cache.num_evicted_pages,
            "ledger_violations": sum(slots.num_violations for slots, _ in self.pools),
        }
        for kind in self.kinds:
            counted |= kind.counters
        return counted


def _present(holdings: Iterable[Holding | None]) -> list[Holding]:
    return [holding for holding in holdings if holding is not None]

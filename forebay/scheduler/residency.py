"""How admitted requests come by what they hold (rows, pages, pins, windows and states), and when it is given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from forebay.base import fault
from forebay.base.units import ceil_div
from forebay.config.engine_config import SchedulerConfig, StateStrategy
from forebay.memory.footprint import footprint, tracking_slots, window_margin
from forebay.memory.holding import NOTHING, Leaving, Residency, RowTable, Steps
from forebay.memory.hybrid_rows import HybridReqToTokenPool
from forebay.memory.kinds.kind import Kind
from forebay.memory.kinds.recurrent import States
from forebay.memory.kinds.window import Windows
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Match, Pin, no_match
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import PAD, Ids, Slots, as_ids
from forebay.memory.tracking import Snapshot
from forebay.requests.request import Request
from forebay.requests.schedule_batch import Chunk, ScheduleBatch
from forebay.requests.step_plan import Kept, StepPlan
from forebay.scheduler.kept import KeptOnHost
from forebay.scheduler.row_writes import RowWriter
from forebay.scheduler.states import StateKeeper
from forebay.scheduler.windows import WindowKeeper


class Residencies:
    """Rows, KV pages and prefix cache of one engine; windows and states where the model's layers keep such things.

    What each request holds is its `Residency`. What a step in flight may still write is not released: it waits for the
    commit of the last step launched before it was let go.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.kv = PagedKvAllocator(config.num_pages, config.page_size, ledger=config.ledger)
        self.kept = KeptOnHost(config.state)
        self.states: StateKeeper | None = None
        self.windows: WindowKeeper | None = None
        self._reuse = config.radix_cache
        self.steps = Steps()
        self.leaving: list[Leaving] = []  # what has been let go of and is not released yet
        self._make_pools(config)
        self.table = RowTable(self.rows.slots.num_rows, config.page_size)
        self.row_writes = RowWriter(self.rows)

    def _make_pools(self, config: SchedulerConfig) -> None:
        ps, kept = config.page_size, config.state
        rows, context, ledger = config.max_running_requests, config.context_length, config.ledger
        hybrid: HybridReqToTokenPool | None = None
        states: States | None = None
        windows: Windows | None = None
        if kept.num_slots:
            extra_buffer = kept.strategy is StateStrategy.EXTRA_BUFFER and config.radix_cache
            hybrid = HybridReqToTokenPool(
                rows,
                context,
                mamba_size=kept.num_slots,
                num_tracking=tracking_slots(extra_buffer, config.overlap_depth),
                page_size=ps,
                ledger=ledger,
            )
            states = States(hybrid.mamba_pool)
        if kept.num_window_pages:
            windows = Windows(
                kept.num_window_pages,
                config.num_pages,
                page_size=ps,
                window=kept.window,
                margin=window_margin(ps, kept.track_interval if kept.num_slots else 0),
                ledger=ledger,
            )
        self.rows = hybrid or ReqToTokenPool(rows, context, page_size=ps, ledger=ledger)
        self.kinds: tuple[Kind, ...] = tuple(kind for kind in (states, windows) if kind)
        self.cache = RadixCache(self.kv, ps, policy=config.radix_eviction_policy, kinds=self.kinds)
        if hybrid and states:
            self.states = StateKeeper(config, hybrid, states)
        if windows:
            self.windows = WindowKeeper(windows, self.rows)

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free, or cached and not pinned."""
        return self.kv.num_free + self.cache.num_evictable

    @property
    def usable_pages(self) -> int:
        """Pages that a request could have if it were alone: all but those that are set aside for good."""
        return self.kv.capacity - self.kv.num_quarantined

    @property
    def leaving_pages(self) -> int:
        """Pages that will be available when the steps in flight have committed."""
        return sum(leaving.num_pages for leaving in self.leaving)

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
        if pin.num_pages and self.states:
            self.states.cached.lock(pin.node)
        if pin.num_pages and self.windows:
            self.windows.lock(match.pages)
        return pin

    def unpin(self, pin: Pin, match: Match) -> None:
        if pin.num_pages and self.states:
            self.states.cached.unlock(pin.node)
        if pin.num_pages and self.windows:
            self.windows.unlock(match.pages)
        self.cache.unpin(pin)

    def pages_to_admit(self, req: Request, pin: Pin) -> int:
        return footprint(len(req.tokens), self.page_size, held_pages=pin.num_pages).pages

    @property
    def can_have_states(self) -> bool:
        """Whether one more request can be given its state slots, with the cached states that are locked staying."""
        return self.states is None or self.states.cached.num_available >= self.states.rows.slots_per_req

    def admit(self, req: Request, match: Match, pin: Pin, branches: Iterable[int] = ()) -> None:
        """Give the request a row, pages for all its known tokens and state slots, all or nothing; the pin becomes the
        request's. A request that was kept on the host goes on from there. `branches` are lengths at which other
        prompts part from its own.

        The caller has checked that there is enough: OutOfSlots here is a fault of ours.
        """
        held = Residency(self.table, req.id, pin, len(req.tokens))
        need = self.pages_to_admit(req, pin)
        with ExitStack() as undo:
            undo.callback(self.unpin, pin, match)
            self._make_room(need)
            if self.states:
                self.states.cached.make_room(self.states.rows.slots_per_req)
            pages = undo.enter_context(self.kv.take(need, req.id))
            fault.point("residency.admit")
            self.rows.alloc([held])
            undo.pop_all()
        req.held = held
        self.table.move_in(held, req.max_kv_len)
        num_kept = self.kept.num_tokens(req.id)
        held.kv_len = num_kept or match.num_tokens
        held.kv_committed = match.num_tokens  # what comes back from the host is there when its step has completed
        self.row_writes.write(held.row, 0, np.concatenate([match.pages, pages.ids]))
        if self.windows:
            held.window_start = self.windows.pool.first_needed(held.kv_len)
        if self.states:
            self.states.admit(held, num_prompt=req.num_prompt, hints=req.resume_points, branches=branches)
        if num_kept:
            self._load(held)
        elif self.states:
            self.states.begin(held)

    def _load(self, held: Residency) -> None:
        """Bring back what the request kept on the host."""
        stop = ceil_div(held.kv_len, self.page_size)
        if self.windows:
            self.windows.pool.take(self.rows.pages(held.row, held.window_start, stop), held.id)
        self.kept.load(self._what_is_kept(held))

    def _what_is_kept(self, held: Residency) -> Kept:
        """The places of the KV and state of the request's first `kv_len` tokens."""
        stop = ceil_div(held.kv_len, self.page_size)
        pages = self.rows.pages(held.row, 0, stop)
        windows = NOTHING
        if self.windows:
            pool = self.windows.pool
            windows = pool.full_to_window[pages[pool.first_needed(held.kv_len) :]].astype(np.int64)
        return Kept(
            request_id=held.id,
            pages=pages,
            window_pages=windows,
            state_slot=held.tracking.live if held.tracking else PAD,
        )

    def keep(self, held: Residency) -> bool:
        """Copy what a request that is about to leave has on the device to the host, if that is worth it."""
        return self.kept.save(self._what_is_kept(held), held.kv_len)

    def slide(self, extending: Iterable[Request]) -> None:
        """Before chunks are cut: let go of what the chunks before have moved the windows past."""
        if self.windows:
            for req in extending:
                self.windows.slide(req.residency)

    def cut(self, req: Request, most: int) -> Chunk:
        """The request's next chunk, of at most so many tokens; it may be empty. Nothing is taken for it yet."""
        held = req.residency
        start = held.kv_len
        stop = min(held.extend_target, start + most)
        return Chunk(req, start, self.states.limit(held, stop) if self.states else stop)

    def extend(self, chunk: Chunk) -> None:
        """The next step computes this chunk."""
        held = chunk.req.residency
        if self.windows:
            self.windows.extend(held, chunk.stop)
        if self.states:
            self.states.extend(held, chunk.stop, self.steps.launched + 1)

    def decode(self, batch: ScheduleBatch, active: Ids | None) -> None:
        """The next step decodes the requests (at the indices `active`): one page more for each whose token opens one,
        and the batch is prepared."""
        rows = batch.req_pool_indices_cpu if active is None else batch.req_pool_indices_cpu[active]
        if self.windows:
            self.windows.decode(self.table, rows)
        self.grow(rows)
        batch.prepare_for_decode(active)
        if self.states:
            self.states.decode(self.table, rows, self.steps)

    def launched(self, step: int) -> None:
        """The plan of `step` is complete."""
        self.steps.launched = step
        self.kept.launched(step)
        if self.states and self.states.sources:
            sources, self.states.sources = self.states.sources, []
            for source in sources:
                self.let_go(Leaving(fence=self.steps.fence(), request_id=PAD, source=source))

    def grow(self, rows: Ids) -> None:
        """One page more for each of the rows whose next token opens one."""
        rows = rows[self.opens_page(rows)]
        if not len(rows):
            return
        self._make_room(len(rows))
        owners = self.table.request_id[rows]
        pages = self.kv.take_ids(len(rows), owners)
        self.row_writes.write_each(rows, self.table.kv_len[rows] // self.page_size, pages)
        if self.windows:
            self.windows.pool.take(pages, owners)

    def opens_page(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Of each row, whether its next token is the first of a page."""
        opens: npt.NDArray[np.bool_] = self.table.kv_len[rows] % self.page_size == 0
        return opens

    def _make_room(self, num_pages: int) -> None:
        short = num_pages - self.kv.num_free
        if short > 0:
            self.cache.evict(short)

    # -- going out ------------------------------------------------------------------------------------------------

    def adopt(self, req: Request, num_committed: int) -> None:
        """Let the cache have the whole pages among the first `num_committed` tokens, all written by completed steps;
        where layers have states, only up to the last of those that such steps wrote."""
        if not self._reuse:
            return
        if self.states is None:
            self._adopt(req, num_committed // self.page_size)
            return
        held = req.residency
        tracking = held.tracking
        assert tracking is not None
        tracking.complete(self.steps.committed)
        while tracking.ready:
            snapshot = tracking.ready.pop(0)
            self._adopt(req, snapshot.length // self.page_size)
            if not self._give_state(held, snapshot):
                self.let_go(Leaving(fence=self.steps.fence(), request_id=req.id, state_slots=as_ids([snapshot.slot])))

    def _adopt(self, req: Request, stop: int) -> None:
        """Let the cache have the request's pages up to `stop`. Where it has such pages already, the request's row turns
        to those and its own copies are let go."""
        held = req.residency
        start = held.pin.num_pages
        if stop <= start:
            return
        own = self.rows.pages(held.row, start, stop)
        adoption = self.cache.extend_pin(held.pin, req.key(stop * self.page_size), own, req.id)
        num_replaced = len(adoption.replaced)
        if num_replaced:
            self.row_writes.write(held.row, start, adoption.replaced)
        if self.windows:
            self.windows.adopted(held, start, stop)
        if num_replaced:
            pages = own[:num_replaced]
            self.let_go(
                Leaving(
                    fence=self.steps.fence(),
                    request_id=req.id,
                    pages=pages,
                    window_pages=self.windows.pool.detach(pages) if self.windows else NOTHING,
                )
            )

    def _give_state(self, held: Residency, snapshot: Snapshot) -> bool:
        assert self.states is not None
        return self.states.cached.attach(held.pin, snapshot.slot, snapshot.length, held.id)

    def is_finishing(self, req: Request) -> bool:
        """Whether more of a request that ends now can be cached if its release waits for its steps in flight."""
        return self.states is not None and self.states.is_finishing(req.residency, len(req.tokens))

    def release(self, req: Request, num_committed: int | None = None) -> None:
        """Take back all that the request holds, now or when no step in flight can touch it any more.

        With `num_committed` the cache first adopts what completed steps wrote, and the latest state of it.
        """
        given: int | None = None
        if num_committed is not None and self._reuse:
            given = self._adopt_last(req, num_committed)
        held = req.residency
        own = self.rows.pages(held.row, held.pin.num_pages, held.num_pages)
        windows, unlocked = NOTHING, NOTHING
        if self.windows:
            self.windows.slide(held)
            windows, unlocked = self.windows.leave(held, held.window_start, held.num_pages)
        slots = self.states.take_slots(held, given) if self.states else NOTHING
        req.held = None
        self.table.move_out(held.row)
        self.row_writes.forget(held.row)
        self.let_go(
            Leaving(
                fence=self.steps.fence(),
                request_id=req.id,
                row=held.row,
                pages=own,
                pin=held.pin,
                window_pages=windows,
                unlocked=unlocked,
                state_slots=slots,
            )
        )

    def _adopt_last(self, req: Request, num_committed: int) -> int | None:
        """Adopt what a leaving request computed; the slot that became the cache's."""
        self.adopt(req, num_committed)
        last = self.states.last(req.residency, num_committed) if self.states else None
        if last is None:
            return None
        self._adopt(req, last.length // self.page_size)
        return last.slot if self._give_state(req.residency, last) else None

    def let_go(self, leaving: Leaving) -> None:
        """Release this, as soon as its fence is open."""
        if leaving.fence.is_open:
            self.take_back(leaving)
        else:
            self.leaving.append(leaving)

    def committed(self, plan: StepPlan) -> None:
        """This step and all before it have completed: what they wrote counts, and what only they could write is
        released."""
        self.table.commit(plan.rows, plan.seq_lens)
        self.steps.committed = plan.step
        self._take_back_what_is_free()

    def _take_back_what_is_free(self) -> None:
        """Fences need not open in the order in which they were set."""
        at = 0
        while at < len(self.leaving):
            if self.leaving[at].fence.is_open:
                self.take_back(self.leaving.pop(at))
            else:
                at += 1

    def take_back(self, leaving: Leaving) -> None:
        if len(leaving.pages):
            self.kv.return_ids(leaving.pages, leaving.request_id)
        if leaving.row != PAD:
            self.rows.free_row(leaving.row)
        if self.windows:
            self.windows.pool.slots.return_ids(leaving.window_pages, leaving.request_id)
            self.windows.pool.unlock(leaving.unlocked)
        if self.states and len(leaving.state_slots):
            self.states.pool.free(leaving.state_slots, leaving.request_id)
        if self.states and leaving.source:
            self.states.cached.unlock(leaving.source)
        if leaving.pin is not None:
            self.cache.unpin(leaving.pin)

    def start_over(self, reqs: Iterable[Request], ended: Iterable[Request], void: Sequence[StepPlan]) -> None:
        """Take back what everybody holds: of `reqs` what completed steps wrote is adopted, of `ended` nothing. The
        steps of the plans `void`, all those in flight, and what is planned since do not count."""
        for req in reqs:
            self.release(req, req.residency.kv_committed)
        for req in ended:
            self.release(req)
        self.kept.start_over(void, self.steps.committed)
        self.row_writes.take()
        if self.states:
            self.states.start_over()
        self.steps.committed = self.steps.launched
        self._take_back_what_is_free()
        if self.windows:
            # What the void steps were to tell the device; the rest does no harm.
            self.windows.pool.write_again(np.flatnonzero(self.windows.pool.full_to_window))

    def clear(self, void: Sequence[StepPlan]) -> None:
        """Everything is free and nothing is cached, whatever the books said: nobody holds anything, and no step of the
        plans `void`, all those in flight, counts."""
        self.kept.start_over(void, committed=-1)
        self.row_writes.take()
        self.leaving.clear()
        self.steps.committed = self.steps.launched
        self.cache.clear()
        self.kv.clear()
        self.rows.clear()
        self.table.clear()
        if self.states:
            self.states.take_snapshots()
            self.states.sources = []

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
        if self.states:
            counted |= {
                "checkpoints.taken": self.states.num_taken,
                "checkpoints.skipped": self.states.num_skipped,
                "states_evicted": self.states.cached.num_evicted,
                "dead_kv_tokens": self.states.cached.num_dead_pages * self.page_size,
            }
        return counted

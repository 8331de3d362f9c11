"""How admitted requests come by what they hold (rows, pages, pins, and more by kind), and when it is given back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from forebay.base.units import ceil_div
from forebay.memory.holding import Allocation
from forebay.memory.kinds.kind import Arrival, Kind
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import MISSES, Match, Pin
from forebay.memory.slots import NO_IDS, NO_OWNER, NO_SLOT, Ids, inside
from forebay.requests.request import Request
from forebay.requests.schedule_batch import Chunk, ScheduleBatch
from forebay.requests.step_plan import HostCopy, StepPlan
from forebay.requests.transfers import Span
from forebay.scheduler.releases import Releases
from forebay.scheduler.step_draft import StepDraft


class Allocations(Releases):
    """The rows, KV pages, prefix cache and other kinds of cache of one engine, and their holders. A request holds its
    `Allocation`."""

    # -- coming in ------------------------------------------------------------------------------------------------

    def match(self, req: Request) -> Match:
        """Match the request's tokens with the cache; the last one is always computed, so it is never asked for."""
        if not self._reuse:
            return MISSES[MissReason.DISABLED]
        if req.wants_prompt_logprobs:
            return MISSES[MissReason.PROMPT_LOGPROBS]
        if req.pools_all:
            return MISSES[MissReason.POOLING]
        return self.cache.match(req.key(len(req.tokens) - 1), req.cache_namespace)

    def pin(self, req: Request, match: Match) -> tuple[Match, Pin]:
        """Keep all that `match` found, until `unpin` or for as long as the request needs it; or a miss, where what
        it would go on from takes the slot that the request needs for its own: better to start than to wait."""
        pin = self.cache.pin(match, req.cache_namespace, req.priority, req.author, req.tenant, req.arrival)
        if pin.num_pages:
            for kind in self.kinds:
                kind.lock(pin.node, match.pages)
        if match.num_tokens and (scarce := self.scarce):
            self.unpin(pin, match)
            return self.pin(req, match.given_up(scarce.missing))
        return match, pin

    def unpin(self, pin: Pin, match: Match) -> None:
        """Release a pin in the prefix cache, and the locks of each kind on the matched pages."""
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
        """The kind that one more request would lack, None for none. A kind lacks slots if it cannot give at once what
        an admission takes, with all that is locked staying, or cannot promise what the request may take later."""
        for kind in self.kinds:
            if kind.slots_per_request and kind.num_available < kind.slots_per_request:
                return kind
            if kind.reserve.per_row > self.num_unpromised(kind):
                return kind
        return None

    def admit(self, req: Request, match: Match, pin: Pin, num_pages: int, branches: Iterable[int] = ()) -> None:
        """Give the request a row, the `num_pages` that its known tokens still need and what else it needs, all or
        nothing; the pin is then its own. A request that was offloaded goes on from its host copy. `branches` are
        lengths at which other prompts part from its own.

        The caller has checked that there is enough: OutOfSlots here is a fault of ours.
        """
        held, pages = self._take(req, match, pin, num_pages)
        num_loaded = self.offloaded.num_tokens(req.id) if self.offloaded.num_bytes else 0
        self.table.move_in(
            held,
            max_kv_len=req.max_kv_len,
            num_pages=len(pages),
            kv_len=num_loaded or match.num_tokens,
            kv_committed=match.num_tokens,  # what comes back from the host is there when its step has completed
        )
        self.draft.write_row(held.row, 0, pages)
        if self.kinds:
            arrival = Arrival(req.num_prompt, num_loaded > 0, req.resume_points, branches)
            for kind in self.kinds:
                kind.admit(held, arrival, self.draft)
        if num_loaded:
            self.offloaded.load(self._host_copy(held), self.draft)

    def _take(self, req: Request, match: Match, pin: Pin, num_pages: int) -> tuple[Allocation, Ids]:
        """A row and pages; those of the match stand first."""
        held = Allocation(self.table, req.id, pin, len(req.tokens))
        pages = NO_IDS
        try:
            self._make_room(num_pages)
            for kind in self.kinds:
                kind.make_room(kind.slots_per_request)
            pages = self.kv.take_ids(num_pages, req.id)
            self.rows.alloc([held])
        except BaseException:
            self.kv.return_ids(pages, req.id)
            self.unpin(pin, match)
            raise
        req.held = held
        return held, np.concatenate([*match.chunks, pages])

    def pre_allocate(self, req: Request, match: Match, pin: Pin, num_pages: int) -> None:
        """As `admit`, for a prompt that another engine computes: places for all that layers keep of it. The device
        hears of the row when the request joins those that run."""
        held, pages = self._take(req, match, pin, num_pages)
        num_tokens, found = len(req.tokens), match.num_tokens
        self.table.move_in(held, max_kv_len=req.max_kv_len, num_pages=len(pages), kv_len=num_tokens, kv_committed=found)
        self.rows.req_to_token[held.row, : len(pages)] = pages
        for kind in self.kinds:
            kind.admit(held, Arrival(num_tokens, from_elsewhere=True), self.draft)

    def join(self, req: Request) -> None:
        """All that was to come from another engine is there: from the next step on the request runs, and the cache may
        have its pages."""
        held = req.allocation
        self.adopt(req, held.kv_committed)
        self.draft.forget_row(held.row)
        self.draft.write_row(held.row, 0, self.rows.pages(held.row, 0, held.num_pages))
        self.draft.prebuilt.append(req)

    def kv_places(self, held: Allocation, start: int, stop: int) -> dict[str, Span]:
        """Where the KV lies of its tokens from `start` on, a multiple of the page size, in the pages up to `stop`."""
        pages = self.rows.pages(held.row, start // self.page_size, ceil_div(stop, self.page_size))
        return {self.kv.name: Span(start=start, ids=pages)}

    def places(self, held: Allocation, start: int, kv_start: int) -> dict[str, Span]:
        """Return the places of all that layers keep of its tokens from `start` on, but of KV from `kv_start` on."""
        spans = self.kv_places(held, kv_start, held.kv_len)
        pages = self.rows.pages(held.row, 0, ceil_div(held.kv_len, self.page_size))
        for kind in self._transferred:
            ids = kind.transfer_slots(held, pages, start // self.page_size)
            at = (len(pages) - len(ids)) * self.page_size if kind.of_pages else 0
            spans[kind.name] = Span(start=at, ids=ids)
        return spans

    def count(self, totals: Mapping[str, Ids]) -> None:
        """Take in what kinds of cache have counted on the device, by kind."""
        for kind in self.kinds:
            if kind.name in totals:
                kind.count(totals[kind.name])

    @property
    def _transferred(self) -> Iterable[Kind]:
        return (kind for kind in self.kinds if kind.is_transferred)

    def _host_copy(self, held: Allocation) -> HostCopy:
        """Return a host copy of all that layers keep of the request's first `kv_len` tokens."""
        pages = self.rows.pages(held.row, 0, ceil_div(held.kv_len, self.page_size))
        slots = {kind.name: kind.transfer_slots(held, pages) for kind in self._transferred}
        return HostCopy(request_id=held.id, slots={self.kv.name: pages, **slots})

    def offload(self, held: Allocation) -> bool:
        """Copy what a request that is about to leave has on the device to the host, if that is worth it."""
        return self.offloaded.save(self._host_copy(held), held.kv_len, self.draft)

    def trim(self, extending: Iterable[Request]) -> None:
        """Before chunks are cut: let go of what the chunks before have left behind."""
        if self.kinds:
            rows = np.array([req.allocation.row for req in extending], dtype=np.int64)
            for kind in self.kinds:
                kind.trim(self.table, rows)

    def extend(self, req: Request, most: int, *, starts: bool) -> Chunk:
        """Draft the request's next chunk, of at most `most` tokens, and return it. It ends in front of a picture's
        token that has yet to be encoded. An empty chunk is drafted only if the request starts with it. A chunk that
        begins in a run of tokens that must not be cut is longer where it has to be."""
        held = req.allocation
        start = held.kv_len
        stop = min(held.extend_target, start + most)
        if self.pictures is not None and req.pictures is not None:
            stop = req.pictures.limit(start, stop, self.pictures)
        for kind in self.kinds:
            stop = kind.limit(held, stop)
        chunk = Chunk(req, start, stop)
        if starts or stop > start:
            for kind in self.kinds:
                kind.extend(held, stop, self.draft)
            self.draft.chunks.append(chunk)
        return chunk

    def decode(self, batch: ScheduleBatch, active: Ids | None) -> None:
        """The next step decodes the requests (at the indices `active`): one page more for each whose token opens one,
        and the batch is prepared."""
        rows = batch.req_pool_indices_cpu if active is None else batch.req_pool_indices_cpu[active]
        for kind in self.kinds:
            kind.trim(self.table, rows)
        growing = rows[self.opens_page(rows)]
        if len(growing):
            self._grow(growing, self.table.num_pages[growing])
        batch.prepare_for_decode(active)

    def add_drafts(self, rows: Ids, counts: Ids, draft_tokens: list[int]) -> int:
        """Add draft tokens to these rows, which the next step decodes and verifies, and return their number. Their
        pages come as those of tokens do, a few steps early; where there are too few without anybody giving way, only
        those are verified that stand on pages which the rows have. `draft_tokens` are these tokens, where the host has
        them."""
        bound, num_pages = self.table.kv_bound[rows], self.table.num_pages[rows]
        missing = np.maximum(ceil_div(bound + counts, self.page_size) - num_pages, 0)
        if (total := int(missing.sum())) > self.available_pages:
            total, kept = 0, np.minimum(counts, num_pages * self.page_size - bound)
            draft_tokens = list(compress(draft_tokens, inside(counts) < np.repeat(kept, counts)))
            counts = kept
        if total:
            self._grow(np.repeat(rows, missing), np.repeat(num_pages, missing) + inside(missing))
        self.table.add_drafts(rows, counts)
        self.draft.num_drafts, self.draft.draft_tokens = counts, draft_tokens
        return int(counts.sum())

    def give_back_unused(self, rows: Ids) -> bool:
        """Let go of pages of these rows, which decode, that were taken for draft tokens and stand behind that of the
        next token; whether there were any. Where only the device knows the length, none are."""
        needed = self.table.kv_bound[rows] // self.page_size + 1
        unused = (self.table.num_drafts[rows] == 0) & (self.table.num_pages[rows] > needed)
        for row, stop in zip(rows[unused].tolist(), needed[unused].tolist(), strict=True):
            held = self.table.allocation_of(row)
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
        self.draft = StepDraft(draft.step + 1, self.rows, pictures=self.pictures)
        for holding in draft.reads:
            self._let_holding_go(holding, NO_OWNER)
        return plan

    def opens_page(self, rows: Ids) -> npt.NDArray[np.bool_]:
        """Return for each row whether its next token is the first of a page that it does not have."""
        opens: npt.NDArray[np.bool_] = self.table.kv_bound[rows] >= self.table.num_pages[rows] * self.page_size
        return opens

    def _make_room(self, num_pages: int) -> None:
        short = num_pages - self.kv.num_free
        if short > 0:
            self.cache.evict(short)

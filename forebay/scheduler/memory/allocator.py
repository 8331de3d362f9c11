"""The memory of requests: reuse of the prefix cache, allocation and release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import numpy as np

from forebay.base.units import ceil_div
from forebay.memory.holding import Allocation
from forebay.memory.kinds.kind import Arrival
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import MISSES, Adoption, Match, Pin
from forebay.memory.retention import NotKept, Retained
from forebay.memory.slots import NO_IDS, NO_SLOT, Ids, inside
from forebay.requests.request import Request
from forebay.requests.schedule_batch import Chunk, ScheduleBatch
from forebay.scheduler.memory.host_copies import HostCopies
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.memory.retaining import retain_prefixes
from forebay.scheduler.memory.tiers import Tiers


class Prefixes:
    """The prefix cache and the other kinds of cache, for requests: match and pin before admission, adopt after each
    step."""

    def __init__(self, pools: Pools, tiers: Tiers, *, reuse: bool) -> None:
        self._tiers = tiers
        self._pools, self._kinds, self._cache, self._page_size = pools, pools.kinds, pools.cache, pools.page_size
        self._reuse = reuse
        # The resumable lengths of a request without a hit, by the kinds that can end one.
        self.nothing_resumable = {kind.name: 0 for kind in self._kinds.resumed}
        self.at_ends = self._cache.at_ends  # whether it matters where prompts part

    # -- matching -------------------------------------------------------------------------------------------------

    def match(self, req: Request) -> Match:
        """Match the request's tokens with the cache, without the last one, which is always computed."""
        if not self._reuse:
            return MISSES[MissReason.DISABLED]
        if req.wants_prompt_logprobs:
            return MISSES[MissReason.PROMPT_LOGPROBS]
        if req.pools_all:
            return MISSES[MissReason.POOLING]
        return self._cache.index.match(req.key(len(req.tokens) - 1), req.cache_namespace)

    def pin(self, req: Request, match: Match) -> tuple[Match, Pin]:
        """Protect all that `match` found from eviction, until `unpin` or the request's release.

        If the matched state takes the slot that the request itself needs, return a miss instead, so that the request
        starts and does not wait."""
        pin = self._cache.pin(match, req.cache_namespace, req.priority, req.author, req.tenant, req.arrival)
        if pin.num_pages:
            for kind in self._kinds.resumed:
                kind.lock(pin.node, match.pages)
        if match.num_tokens and (scarce := self._pools.scarce):
            self.unpin(pin, match)
            return self.pin(req, match.given_up(scarce.missing))
        if self._tiers.all:
            self._tiers.retention.use(req, match.num_tokens)
        return match, pin

    def unpin(self, pin: Pin, match: Match) -> None:
        """Release a pin in the prefix cache, and the locks of each kind on the matched pages."""
        if pin.num_pages:
            for kind in self._kinds.resumed:
                kind.unlock(pin.node, match.pages)
        self._cache.unpin(pin)

    # -- adopting -------------------------------------------------------------------------------------------------

    def adopt(self, req: Request, num_committed: int, *, last: bool = False) -> None:
        """Let the cache adopt the whole pages among the first `num_committed` tokens, all written by completed steps,
        up to the last length from which a request can resume. With `last` the request is leaving.

        If the cache has such pages already, the request's row uses those, and its own copies are freed. Accepted draft
        tokens behind the request's end are not adopted."""
        if not self._reuse:
            return
        allocation = req.allocation
        ends: Sequence[int] = (min(num_committed, len(req.tokens)),)
        for kind in self._kinds.adoptable:
            ends = kind.adoptable_ends(allocation, ends, self._pools.steps.committed, last=last)
        for end in ends:
            start, stop = allocation.pin.num_pages, end // self._page_size
            if stop > start:
                own = self._pools.rows.pages(allocation.row, start, stop)
                adoption = self._cache.extend_pin(allocation.pin, req.key(stop * self._page_size), own, req.id)
                if len(adoption.replaced):
                    self._replace(allocation, start, own, adoption)
            for adopting in self._kinds.adopted:
                self._pools.deferred.free_holding(adopting.adopted(allocation, start, end), req.id)
        if self._tiers.all:
            self._tiers.store(req, allocation)

    def _replace(self, allocation: Allocation, start: int, own: Ids, adoption: Adoption) -> None:
        """Let the row use pages that the cache had already, from page `start` on, and free the request's `own`."""
        self._pools.draft.write_row(allocation.row, start, adoption.replaced)
        if len(adoption.remapped):
            self._pools.draft.remap(adoption.remapped)
        self._pools.deferred.free_pages(allocation, own[: len(adoption.replaced)])

    # -- retaining ------------------------------------------------------------------------------------------------

    def retain(self, req: Request, now: float) -> tuple[int, float, str]:
        """Retain the prefixes that a request asks for, in each tier as far as it has them. Return of the device's cache
        the length in tokens of the longest, the seconds for which it is kept, and why that is not all: "" if it is."""
        if not self._reuse:
            return 0, 0.0, MissReason.DISABLED
        found, why = retain_prefixes(self._cache, req, req.cache_namespace, now)
        if self._tiers.all:
            self._tiers.retention.retain(req, now)
        return self._kept(found, now, why)

    def retain_at_end(self, req: Request, now: float) -> tuple[int, float, str]:
        """Retain the prefixes that an ending request asks for, if its prompt was computed. Return what `retain` does;
        for a request that asks for none, the longest prefix of its prompt that another request has had retained."""
        if req.retentions:
            return self.retain(req, now) if req.num_output else (0, 0.0, NotKept.UNFINISHED)
        if not self._cache.retention.nodes:
            return 0, 0.0, NotKept.NOT_ASKED
        match = self._cache.index.match(req.key(req.num_prompt), req.cache_namespace)
        return self._kept(self._cache.retention.of(match.node), now, NotKept.NOT_ASKED)

    def _kept(self, found: Retained | None, now: float, why: str) -> tuple[int, float, str]:
        return (len(found.pages) * self._page_size, found.until - now, why) if found else (0, 0.0, why)

    def next_adoptable_end(self, allocation: Allocation, stop: int) -> int | None:
        """Return the first length, `stop` or more, up to which the cache will adopt what the request computes."""
        end = stop if allocation.kv_committed < stop else None
        for kind in self._kinds.adoptable:
            end = kind.next_adoptable_end(allocation, stop, end)
        return end

    def is_finishing(self, req: Request) -> bool:
        """Return whether more of a request that ends now can be adopted if its release waits for its steps in
        flight."""
        return any(kind.is_finishing(req.allocation, len(req.tokens)) for kind in self._kinds.adoptable)

    def checkpoints(self, pin: Pin) -> list[int]:
        """Return the lengths of a pinned prefix from which a request can resume, if that is possible only at ends of
        nodes."""
        kinds = [kind for kind in self._kinds.resumed if kind.at_ends]
        lengths: list[int] = []
        node, num_pages = pin.node, pin.num_pages
        while kinds and node.parent is not None:
            if all(kind.num_kept(node) for kind in kinds):
                lengths.append(num_pages * self._page_size)
            node, num_pages = node.parent, num_pages - len(node.pages)
        return lengths[::-1]


class Allocator:
    """Allocates rows, pages and slots of other kinds to requests, each of which holds its `Allocation`."""

    def __init__(self, pools: Pools, prefixes: Prefixes, host_copies: HostCopies) -> None:
        self._pools, self._prefixes, self._host_copies = pools, prefixes, host_copies
        self._rows, self._table, self._kinds = pools.rows, pools.table, pools.kinds
        self._page_size = pools.page_size

    # -- admission ------------------------------------------------------------------------------------------------

    def admit(self, req: Request, match: Match, pin: Pin, num_pages: int, branches: Iterable[int] = ()) -> None:
        """Allocate a row, the `num_pages` that the request's known tokens still need, and slots of other kinds, all or
        nothing. The request owns the pin from then on. An offloaded request resumes from its host copy. `branches` are
        lengths at which other prompts part from this one.

        The caller has checked that there is enough: OutOfSlots here is an internal error.
        """
        allocation, pages = self._allocate(req, match, pin, num_pages)
        copies, draft = self._host_copies, self._pools.draft
        num_loaded = copies.num_tokens(req.id) if copies.num_bytes else 0
        self._table.move_in(
            allocation,
            max_kv_len=req.max_kv_len,
            num_pages=len(pages),
            kv_len=num_loaded or match.num_tokens,
            kv_committed=match.num_tokens,  # what is loaded from the host is there once its step has committed
        )
        draft.write_row(allocation.row, 0, pages)
        if self._kinds.held:
            arrival = Arrival(req.num_prompt, num_loaded > 0, req.resume_points, branches)
            for kind in self._kinds.held:
                kind.admit(allocation, arrival, draft)
        if num_loaded:
            copies.load(self._pools.host_copy(allocation), draft)

    def _allocate(self, req: Request, match: Match, pin: Pin, num_pages: int) -> tuple[Allocation, Ids]:
        """Allocate a row and pages, and return them; the pages of the match come first."""
        pools = self._pools
        allocation = Allocation(self._table, req.id, pin, len(req.tokens))
        pages = NO_IDS
        try:
            pools.make_room(num_pages)
            for kind in self._kinds.resumed:
                kind.make_room(kind.slots_per_request)
            pages = pools.kv.take_ids(num_pages, req.id)
            self._rows.alloc([allocation])
        except BaseException:
            pools.kv.return_ids(pages, req.id)
            self._prefixes.unpin(pin, match)
            raise
        req.maybe_allocation = allocation
        return allocation, np.concatenate([*match.chunks, pages])

    def pre_allocate(self, req: Request, match: Match, pin: Pin, num_pages: int) -> None:
        """Allocate for a prompt that another engine computes, all that layers keep of it. The row is sent to the
        device when the request starts to decode (`join`)."""
        allocation, pages = self._allocate(req, match, pin, num_pages)
        num_tokens, found = len(req.tokens), match.num_tokens
        self._table.move_in(
            allocation, max_kv_len=req.max_kv_len, num_pages=len(pages), kv_len=num_tokens, kv_committed=found
        )
        self._rows.req_to_token[allocation.row, : len(pages)] = pages
        for kind in self._kinds.held:
            kind.admit(allocation, Arrival(num_tokens, from_elsewhere=True), self._pools.draft)

    def join(self, req: Request) -> None:
        """Start a request whose transfer is complete: the next step may decode it, and the cache adopts its prompt."""
        allocation, draft = req.allocation, self._pools.draft
        self._prefixes.adopt(req, allocation.kv_committed)
        draft.forget_row(allocation.row)
        draft.write_row(allocation.row, 0, self._rows.pages(allocation.row, 0, allocation.num_pages))
        draft.prebuilt.append(req)

    # -- steps ----------------------------------------------------------------------------------------------------

    def trim(self, extending: Iterable[Request]) -> None:
        """Free what these prompts no longer read, before their next chunks are cut."""
        if self._kinds.trimmed:
            rows = np.array([req.allocation.row for req in extending], dtype=np.int64)
            for kind in self._kinds.trimmed:
                kind.trim(self._table, rows)

    def extend(self, req: Request, most: int, *, starts: bool) -> Chunk:
        """Draft the request's next chunk, of at most `most` tokens, and return it.

        A chunk ends before a picture's token that is not encoded yet. An empty chunk is drafted only if the request
        starts with it. A chunk that begins in a run of tokens that must not be cut may be longer than `most`."""
        allocation, pools = req.allocation, self._pools
        start = allocation.kv_len
        stop = min(allocation.extend_target, start + most)
        if pools.pictures is not None and req.pictures is not None:
            stop = req.pictures.limit(start, stop, pools.pictures)
        for kind in self._kinds.adoptable:
            stop = kind.limit(allocation, stop)
        chunk = Chunk(req, start, stop)
        if starts or stop > start:
            for extending in self._kinds.extended:
                extending.extend(allocation, stop, pools.draft)
            pools.draft.chunks.append(chunk)
        return chunk

    def decode(self, batch: ScheduleBatch, active: Ids | None) -> tuple[list[Request], Ids]:
        """Prepare the batch to decode the requests at the indices `active`, None for all. Return these requests and
        their rows. Each request whose token opens a page gets one page more."""
        reqs, rows = batch.reqs, batch.req_pool_indices_cpu
        if active is not None:
            reqs, rows = [reqs[i] for i in active.tolist()], rows[active]
        if not reqs:
            return [], NO_IDS
        for kind in self._kinds.trimmed:
            kind.trim(self._table, rows)
        growing = rows[self._pools.opens_page(rows)]
        if len(growing):
            self._grow(growing, self._table.num_pages[growing])
        batch.prepare_for_decode(active)
        return reqs, rows

    def add_drafts(self, rows: Ids, counts: Ids, draft_tokens: list[int]) -> int:
        """Add draft tokens to these rows, which the next step decodes and verifies, and return their number.

        Their pages are allocated as those of sampled tokens, a few steps early. If too few pages are available, only
        the draft tokens on pages that the rows have are added: no request is retracted for drafts. `draft_tokens` are
        the tokens, if the host has them."""
        table, pools = self._table, self._pools
        bound, num_pages = table.kv_bound[rows], table.num_pages[rows]
        missing = np.maximum(ceil_div(bound + counts, self._page_size) - num_pages, 0)
        if (total := int(missing.sum())) > pools.available_pages:
            total, kept = 0, np.minimum(counts, num_pages * self._page_size - bound)
            draft_tokens = list(compress(draft_tokens, inside(counts) < np.repeat(kept, counts)))
            counts = kept
        if total:
            self._grow(np.repeat(rows, missing), np.repeat(num_pages, missing) + inside(missing))
        table.add_drafts(rows, counts)
        pools.draft.num_drafts, pools.draft.draft_tokens = counts, draft_tokens
        return int(counts.sum())

    def _grow(self, rows: Ids, columns: Ids) -> None:
        """Allocate a page for each entry of these rows; a row may occur several times in succession."""
        pools = self._pools
        pools.make_room(len(rows))
        owners = self._table.request_id[rows]
        pages = pools.kv.take_ids(len(rows), owners)
        pools.draft.write_each(rows, columns, pages)
        self._table.num_pages[rows] = columns + 1
        for kind in self._kinds.grown:
            kind.grow(pages, owners, pools.draft)

    # -- releasing ------------------------------------------------------------------------------------------------

    def free_unused(self, rows: Ids) -> bool:
        """Free pages of these decoding rows that were allocated for draft tokens and lie behind the page of the next
        token; return whether there were any. Rows whose length only the device knows keep theirs."""
        needed = self._table.kv_bound[rows] // self._page_size + 1
        unused = (self._table.num_drafts[rows] == 0) & (self._table.num_pages[rows] > needed)
        for row, stop in zip(rows[unused].tolist(), needed[unused].tolist(), strict=True):
            allocation = self._table.allocation_of(row)
            pages = self._rows.pages(row, stop, allocation.num_pages)
            self._rows.req_to_token[row, stop : allocation.num_pages] = NO_SLOT
            allocation.num_pages = stop
            self._pools.deferred.free_pages(allocation, pages)
        return bool(unused.any())

    def release(self, req: Request, num_committed: int | None = None) -> None:
        """Release all that the request holds. It is free once no step in flight and no other engine can access it.

        With `num_committed` the cache first adopts what completed steps wrote.
        """
        if num_committed is not None:
            self._prefixes.adopt(req, num_committed, last=True)
        allocation = req.allocation
        own = self._rows.pages(allocation.row, allocation.pin.num_pages, allocation.num_pages)
        req.maybe_allocation = None
        self._table.move_out(allocation.row)
        self._pools.draft.forget_row(allocation.row)
        self._pools.deferred.free_all(allocation, own)

    def offload(self, allocation: Allocation) -> bool:
        """Copy what a request that is being retracted has on the device to the host, if that is worth it."""
        return self._host_copies.save(self._pools.host_copy(allocation), allocation.kv_len, self._pools.draft)

"""The role of an engine that generates behind prompts which other engines compute.

A request is pending until there is room: then it takes its row, pages and what else layers keep, and offers them to
prefill. When all has arrived it has its first token, and runs as soon as fewer than `max_running_requests` do. What is
retracted later is computed here, or comes back from the host, before anything new is offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from forebay.base.errors import EngineError, ForebayError, RequestTimeout, Unavailable
from forebay.base.units import ceil_div
from forebay.config.engine_config import DisaggregationOptions
from forebay.memory.holding import footprint, footprint_ahead
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool
from forebay.memory.slots import NO_OWNER, Ids, as_ids
from forebay.requests.request import Request, Status, blamed_on
from forebay.requests.schedule_batch import ScheduleBatch
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Decline,
    Event,
    Offer,
    Rendezvous,
    Renewed,
    Tail,
    Ticket,
    digest_of,
)
from forebay.requests.updates import Failure, FinishReason
from forebay.scheduler.early_offers import adapter_of
from forebay.scheduler.handoff import ABORTED, ASLEEP, LOST, OpenTicket, Role
from forebay.scheduler.queues import Line

HANDOVERS_PER_PLAN: Final = 8
"""Requests that one plan offers places for, and as many that begin to decode: 50 to 100 us each. More follow in the
next plans, so that a burst of requests delays no step by more than 2 ms."""


@dataclass(slots=True, eq=False)
class _Receiving(OpenTicket):
    tail: Tail | None = None


@dataclass(slots=True)
class _Demand:
    """Pages that the requests with memory need: to go on for a while (`soon`); for what is being transferred
    (`in_transit`); and the most that one of them still needs until its end (`largest`)."""

    soon: int
    in_transit: int
    largest: int

    def add(self, soon: int, size: int, rest: int) -> None:
        """Count one more transfer, of `size` pages, whose request needs `rest` pages behind it until its end."""
        self.soon += soon
        self.in_transit += size
        self.largest = max(self.largest, rest)


class DecodeRole(Role):
    """`instance` is this process's own, so that tickets of one that was here before are not taken for its."""

    def __init__(self, options: DisaggregationOptions, instance: str) -> None:
        super().__init__(options)
        self._instance = instance
        self._arrived = Line()  # transferred, and not running yet
        self._fresh: set[Request] = set()  # who may have decoded nothing here yet

    def _room(self, rendezvous: Rendezvous) -> object:
        return rendezvous.host, rendezvous.port, rendezvous.room

    def admit(self, req: Request) -> None:
        if self._rests and req.rendezvous:
            self._decline(req, ASLEEP)
            raise Unavailable(ASLEEP.message, code=ASLEEP.code)
        super().admit(req)

    def enqueue(self, req: Request, now: float) -> None:
        """One without another half is computed here."""
        if req.rendezvous is None:
            self.queues.enqueue(req)
            return
        self.queues.join(req.account, self.queues.pending)
        self.queues.wait_for_peer(req)
        self._rooms[self._room(req.rendezvous)] = req

    def ended(self, req: Request, failure: Failure | None) -> None:
        if req in self.queues.pending:
            self._decline(req, failure or ABORTED)
        super().ended(req, failure)
        self._fresh.discard(req)
        if req in self._arrived:
            self._arrived.remove(req)

    def drain(self) -> None:
        super().drain()
        for req in [*self.queues.pending] if self._rests else ():
            self.outputs.finish(req, FinishReason.ERROR, ASLEEP)

    def _decline(self, req: Request, failure: Failure) -> None:
        """Prefill would wait for an offer until it took too long."""
        ticket, where = self._ticket(req)
        self._orders.append(Decline(ticket, where.host, where.port, req.num_prompt, digest_of(req.tokens), failure))

    def _ticket(self, req: Request) -> tuple[Ticket, Rendezvous]:
        where = req.rendezvous
        assert where is not None, f"{req} has no room"
        return Ticket(self._instance, where.room, where.nonce), where

    # -- running -----------------------------------------------------------------------------------------------------

    def before_plan(self, now: float) -> None:
        if not self.queues.suspects.groups:  # nobody else runs while somebody is on trial
            self._join()
            self._offer(now)

    def _join(self) -> None:
        queues = self.queues
        room = queues.config.max_running_requests - queues.num_running
        joining: list[Request] = []
        while self._arrived.of and len(joining) < min(room, HANDOVERS_PER_PLAN):
            joining.append(self._arrived.first)
            self._arrived.remove(joining[-1])
        if not joining:
            return
        rows = cast(DecodeReqToTokenPool, queues.pools.rows)
        rows.alloc_running([req.allocation for req in joining], queues.num_running)
        for req in joining:
            with blamed_on(req):
                queues.memory.allocator.join(req)
            queues.remove(req)
            req.move(Status.DECODING)
        batch = ScheduleBatch(queues.pools.table)
        batch.prepare_for_prebuilt(joining)
        queues.running.merge_batch(batch)
        self._fresh.update(joining)

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrived.of)

    def most_drafts(self, reqs: Sequence[Request], most: Ids) -> Ids:
        """None in a request's first step: the device has those of the row's last tenant, if any."""
        self._fresh = {req for req in self._fresh if req.held and req.held.kv_bound <= req.num_prompt + 1}
        return np.where([req in self._fresh for req in reqs], 0, most) if self._fresh else most

    # -- offering ----------------------------------------------------------------------------------------------------

    def _offer(self, now: float) -> None:
        """Offer places for the first in rank, as long as there is room and no request waits that was here before. None
        are offered while memory of a request is yet to be copied to the host: steps keep their order, other engines
        write at any time."""
        queues = self.queues
        if queues.is_saving:
            return
        demand: _Demand | None = None
        for _ in range(HANDOVERS_PER_PLAN):
            if queues.waiting or not (queues.pending.of and queues.admits and queues.pools.rows.available_size()):
                return
            req = queues.pending.first
            demand = demand or self._demand()
            with blamed_on(req):
                if not self._pre_allocate(req, demand):
                    return
                self._order(req, now)
            self._charge(req, now)
            queues.transfer(req)

    def _charge(self, req: Request, now: float) -> None:
        """As where the prompt is computed, which is then not charged for once more, whatever becomes of it (C32)."""
        account, num_new = req.account, req.num_prompt - req.allocation.kv_committed
        account.service += num_new / account.weight
        account.num_started += 1
        account.queued_s += now - req.arrival
        req.num_charged = req.num_prompt

    def _pre_allocate(self, req: Request, demand: _Demand) -> bool:
        """Give the request its places and add it to `demand`; False if there is no room."""
        memory, page_size = self.queues.memory, self.queues.config.page_size
        match, pin = memory.prefixes.pin(req, memory.prefixes.match(req))
        if memory.pools.scarce or not self._has_room(req, pin.num_pages, demand):
            memory.prefixes.unpin(pin, match)
            return False
        memory.allocator.pre_allocate(req, match, pin, footprint(req.num_prompt, page_size, pin.num_pages))
        size = req.allocation.num_pages
        demand.add(self._pages_soon(req, size), size, footprint(req.max_kv_len, page_size, size))
        return True

    def _demand(self) -> _Demand:
        """Sum up what the requests with memory need; once for all offers of a plan."""
        queues, pools = self.queues, self.queues.pools
        table, page_size, reserved = pools.table, pools.page_size, self._options.num_reserved_decode_tokens
        rows = np.flatnonzero(table.request_id != NO_OWNER)
        soon = footprint_ahead(table.kv_bound[rows], table.max_kv_len[rows], reserved, page_size, table.num_pages[rows])
        arriving = as_ids([req.allocation.row for req in queues.transferring])
        sizes = table.num_pages[arriving]
        decoding = queues.running.req_pool_indices_cpu
        rests = np.concatenate(
            [ceil_div(table.max_kv_len[arriving], page_size) - sizes, ceil_div(table.max_kv_len[decoding], page_size)]
        )
        return _Demand(int(soon.sum()), int(sizes.sum()) + pools.deferred.num_transfer_pages, int(rests.max(initial=0)))

    def _pages_soon(self, req: Request, held_pages: int) -> int:
        """Return the pages that a request with its prompt and `held_pages` pages needs to go on for a while."""
        reserved, page_size = self._options.num_reserved_decode_tokens, self.queues.pools.page_size
        return int(footprint_ahead(req.num_prompt, req.max_kv_len, reserved, page_size, held_pages))

    def _has_room(self, req: Request, num_cached: int, demand: _Demand) -> bool:
        """Whether there are pages for the request and for what it and all others may soon need; and enough that each
        of the running requests could have all that it may ever need, whatever becomes of transfers."""
        pools, page_size = self.queues.pools, self.queues.config.page_size
        if self._pages_soon(req, num_cached) + demand.soon > pools.available_pages:
            return False
        size = footprint(req.num_prompt, page_size)
        largest = max(demand.largest, footprint(req.max_kv_len, page_size) - size)
        return demand.in_transit + size + largest <= pools.usable_pages

    def _order(self, req: Request, now: float) -> None:
        (ticket, where), allocation = self._ticket(req), req.allocation
        start = allocation.pin.num_pages * self.queues.config.page_size
        offer = Offer(
            ticket=ticket,
            host=where.host,
            port=where.port,
            num_tokens=req.num_prompt,
            digest=digest_of(req.tokens),
            start=start,
            spans=self.queues.pools.places(allocation, start, start),
            weight_version=self.queues.weight_version,
            adapter=adapter_of(req),
        )
        deadline = now + self._options.lease_s
        receiving = _Receiving(ticket, req, deadline=deadline, named=[offer.spans], whole=True)
        self._orders.append(offer)
        allocation.ticket = receiving
        self._begin(receiving, req)

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _take(self, event: Event, open_ticket: OpenTicket | None, now: float) -> None:
        if open_ticket is None or open_ticket.settled:
            return
        match event:
            case Renewed():
                open_ticket.deadline = now + self._options.lease_s
            case Arrived(_, tail):
                self._arrive(cast(_Receiving, open_ticket), tail)
            case Broken(_, failure):
                self._fail(open_ticket, failure)
            case _:
                pass

    def _arrive(self, receiving: _Receiving, tail: Tail) -> None:
        """Nothing is done with it before the ticket is closed: whoever wrote may write once more."""
        req = receiving.req
        if req and tail.num_tokens != req.num_prompt:
            what = f"{tail.num_tokens} tokens were sent of a prompt of {req.num_prompt}"
            self._fail(receiving, Failure.of(EngineError(what, code="transfer_lost")))
            return
        receiving.settled, receiving.tail = True, tail
        receiving.deadline = np.inf

    def _close(self, open_ticket: OpenTicket, now: float) -> None:
        super()._close(open_ticket, now)
        receiving, req = cast(_Receiving, open_ticket), open_ticket.req
        if req is None:
            return
        if receiving.tail is None:
            self._fail(receiving, LOST)
            return
        del self._of[req.id]
        if req.status is Status.TRANSFERRING:
            with blamed_on(req):
                self._append_first(req, receiving.tail, now)

    def _append_first(self, req: Request, tail: Tail, now: float) -> None:
        """Append the request's first token, which may be its last."""
        req.allocation.ticket = None
        req.allocation.kv_committed = req.num_prompt
        req.cache_report = tail.cache
        req.prompt_logprobs = (tail.prompt_logprobs or [])[1:]
        self.outputs.append(req, [tail.token_id], [tail.logprob], now)
        if req.status is not Status.FINISHED:
            self._arrived.add(req)

    # -- time and failures -------------------------------------------------------------------------------------------

    def overdue(self, req: Request, now: float) -> ForebayError | None:
        open_ticket = self._of.get(req.id)
        if open_ticket and now > open_ticket.deadline:
            lease = self._options.lease_s
            return RequestTimeout(f"nothing was heard of the request's prompt for {lease:g} s", code="lease_timeout")
        return None

    def start_over(self, *, cleared: bool) -> None:
        """Places that are no longer the requests' are of no use to them: they compute their prompts here."""
        self._fresh.clear()
        for req in [req for req in self._arrived if req.status is not Status.TRANSFERRING]:
            self._arrived.remove(req)
        for open_ticket in self._of.values() if cleared else ():
            open_ticket.req = None
            if not open_ticket.settled:
                self._withdraw(open_ticket.ticket, LOST)
        if cleared:
            self._of.clear()

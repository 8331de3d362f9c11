"""Offers of places to prefill engines, for requests that decode here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.base.units import ceil_div
from forebay.config.engine_config import DisaggregationOptions
from forebay.memory.holding import footprint, footprint_ahead
from forebay.memory.slots import NO_OWNER, as_ids
from forebay.requests.request import Request, blamed_on
from forebay.requests.transfers import Decline, Offer, Rendezvous, Tail, Ticket, digest_of
from forebay.requests.updates import Failure
from forebay.scheduler.arrivals import HANDOVERS_PER_PLAN
from forebay.scheduler.early_offers import adapter_of, pictures_of
from forebay.scheduler.queues import Queues
from forebay.scheduler.tickets import OpenTicket, Tickets


@dataclass(slots=True, eq=False)
class Receiving(OpenTicket):
    """A ticket of places that were offered, with the tail of the transfer once all has arrived."""

    tail: Tail | None = None


@dataclass(slots=True)
class _Demand:
    """Pages that the requests with memory need: to continue for a while (`soon`); for what is being transferred
    (`in_transit`); and the most that one of them still needs until its end (`largest`)."""

    soon: int
    in_transit: int
    largest: int

    def add(self, soon: int, size: int, remaining: int) -> None:
        """Count one more transfer, of `size` pages, whose request needs `remaining` pages behind it until its end."""
        self.soon += soon
        self.in_transit += size
        self.largest = max(self.largest, remaining)


class Offers:
    """Allocates places for pending requests, and orders their offers. `begin` is called with the ticket of each."""

    def __init__(
        self,
        options: DisaggregationOptions,
        instance: str,
        queues: Queues,
        tickets: Tickets,
        begin: Callable[[OpenTicket, Request], None],
    ) -> None:
        self._options, self._instance, self.queues, self._tickets = options, instance, queues, tickets
        self._begin = begin

    def decline(self, req: Request, failure: Failure) -> None:
        """Order that prefill learns that no offer comes, so that it does not wait for its time-out."""
        ticket, where = self._ticket(req)
        digest = req.prompt_digest or digest_of(req.tokens)  # one that is refused is not admitted before
        self._tickets.orders.append(Decline(ticket, where.host, where.port, req.num_prompt, digest, failure))

    def _ticket(self, req: Request) -> tuple[Ticket, Rendezvous]:
        where = req.rendezvous
        assert where is not None, f"{req} has no room"
        return Ticket(self._instance, where.room, where.nonce), where

    def run(self, now: float) -> None:
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
        """Charge the prompt to the tenant as prefill does. Computing it here later is not charged again (C32)."""
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
        """Return the pages that a request with `held_pages` pages needs for its reserved decode tokens."""
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
            digest=req.prompt_digest,
            start=start,
            spans=self.queues.pools.places(allocation, start, start),
            weight_version=self.queues.weight_version,
            adapter=adapter_of(req),
            pictures=pictures_of(req),
        )
        deadline = now + self._options.lease_s
        receiving = Receiving(ticket, req, deadline=deadline, named=[offer.spans], whole=True)
        self._tickets.orders.append(offer)
        allocation.ticket = receiving
        self._begin(receiving, req)

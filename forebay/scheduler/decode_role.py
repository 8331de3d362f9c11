"""The role of an engine that generates behind prompts which other engines compute.

A request is pending until there is room: then it takes its row, pages and what else layers keep, and offers them to
prefill. When all has arrived it has its first token, and runs as soon as fewer than `max_running_requests` do. What is
retracted later is computed here, or comes back from the host, before anything new is offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from forebay.base.errors import EngineError, ForebayError, RequestTimeout, Unavailable
from forebay.config.engine_config import DisaggregationOptions
from forebay.memory.slots import Ids
from forebay.requests.request import Request, Status, blamed_on
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Event,
    Rendezvous,
    Renewed,
    Tail,
)
from forebay.requests.updates import Failure, FinishReason
from forebay.scheduler.arrivals import Arrivals
from forebay.scheduler.handoff import ABORTED, ASLEEP, LOST, Outputs, Role
from forebay.scheduler.offers import Offers, Receiving
from forebay.scheduler.queues import Queues
from forebay.scheduler.tickets import OpenTicket


class DecodeRole(Role):
    """Role of a decode engine. `instance` identifies this process, so that it ignores tickets of an earlier one."""

    def __init__(self, options: DisaggregationOptions, instance: str) -> None:
        super().__init__(options)
        self.instance = instance
        self.offers: Offers
        self.arrivals: Arrivals

    def bind(self, queues: Queues, outputs: Outputs) -> None:
        super().bind(queues, outputs)
        self.offers = Offers(self._options, self.instance, queues, self.tickets, self._begin)
        self.arrivals = Arrivals(queues)

    def _room(self, rendezvous: Rendezvous) -> object:
        return rendezvous.host, rendezvous.port, rendezvous.room

    def admit(self, req: Request) -> None:
        if self._resting and req.rendezvous:
            self.offers.decline(req, ASLEEP)
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
            self.offers.decline(req, failure or ABORTED)
        super().ended(req, failure)
        self.arrivals.forget(req)

    def drain(self) -> None:
        super().drain()
        for req in [*self.queues.pending] if self._resting else ():
            self.outputs.finish(req, FinishReason.ERROR, ASLEEP)

    # -- running -----------------------------------------------------------------------------------------------------

    def before_plan(self, now: float) -> None:
        if not self.queues.suspects.groups:  # nobody else runs while somebody is on trial
            self.arrivals.join()
            self.offers.run(now)

    @property
    def has_arrivals(self) -> bool:
        return bool(self.arrivals.line.of)

    def most_drafts(self, reqs: Sequence[Request], most: Ids) -> Ids:
        return self.arrivals.most_drafts(reqs, most)

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _take(self, event: Event, open_ticket: OpenTicket | None, now: float) -> None:
        if open_ticket is None or open_ticket.settled:
            return
        match event:
            case Renewed():
                open_ticket.deadline = now + self._options.lease_s
            case Arrived(_, tail):
                self._arrive(cast(Receiving, open_ticket), tail)
            case Broken(_, failure):
                self._fail(open_ticket, failure)
            case _:
                pass

    def _arrive(self, receiving: Receiving, tail: Tail) -> None:
        """Record the tail. It is used when the ticket is closed, since the prefill engine may write once more until
        then."""
        req = receiving.req
        if req and tail.num_tokens != req.num_prompt:
            what = f"{tail.num_tokens} tokens were sent of a prompt of {req.num_prompt}"
            self._fail(receiving, Failure.of(EngineError(what, code="transfer_lost")))
            return
        receiving.settled, receiving.tail = True, tail
        receiving.deadline = np.inf

    def _close(self, open_ticket: OpenTicket, now: float) -> None:
        super()._close(open_ticket, now)
        receiving, req = cast(Receiving, open_ticket), open_ticket.req
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
            self.arrivals.line.add(req)

    # -- time and failures -------------------------------------------------------------------------------------------

    def overdue(self, req: Request, now: float) -> ForebayError | None:
        open_ticket = self._of.get(req.id)
        if open_ticket and now > open_ticket.deadline:
            lease = self._options.lease_s
            return RequestTimeout(f"nothing was heard of the request's prompt for {lease:g} s", code="lease_timeout")
        return None

    def start_over(self, *, cleared: bool) -> None:
        """Places that are no longer the requests' are of no use to them: they compute their prompts here."""
        self.arrivals.start_over()
        for open_ticket in self._of.values() if cleared else ():
            open_ticket.req = None
            if not open_ticket.settled:
                self.tickets.withdraw(open_ticket.ticket, LOST)
        if cleared:
            self._of.clear()

"""The role of an engine that computes prompts and the first token behind each.

A request is pending until decode has offered places for its prompt, which may come first and wait for it; then it runs
as any other. Whole pages go as their steps commit; the rest, and the first token, when that is known. The request's
memory is then released behind its ticket, and its end is reported when all has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from forebay.base.errors import EngineError, ForebayError, InvalidRequest, RequestTimeout, Unavailable
from forebay.config.engine_config import DisaggregationOptions
from forebay.requests.request import Request, Status
from forebay.requests.transfers import (
    Broken,
    Closed,
    Event,
    Offered,
    Rendezvous,
    Rest,
    Send,
    Sent,
    Tail,
)
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler.early_offers import room_of
from forebay.scheduler.handoff import ABORTED, ASLEEP, LOST, Outputs, Role
from forebay.scheduler.matches import Matches
from forebay.scheduler.queues import Queues
from forebay.scheduler.tickets import OpenTicket


@dataclass(slots=True, eq=False)
class _Sending(OpenTicket):
    """From token `start` on, and of KV up to `next` it has been done: multiples of the page size. `update` tells the
    request's end."""

    start: int = 0
    next: int = 0
    update: Update | None = None
    reason: FinishReason = FinishReason.LENGTH


class PrefillRole(Role):
    """Role of a prefill engine: matches requests with the offers of decode engines, and sends what it computes."""

    def __init__(self, options: DisaggregationOptions) -> None:
        super().__init__(options)
        self.matches: Matches
        self._refuses = False  # and decode has been informed

    def bind(self, queues: Queues, outputs: Outputs) -> None:
        super().bind(queues, outputs)
        self.matches = Matches(
            self._options,
            queues,
            outputs,
            self.tickets,
            matched=self._start,
            refuses=lambda: self._resting,
            in_room=lambda room: self._rooms.get(room),
        )

    def _room(self, rendezvous: Rendezvous) -> object:
        return rendezvous.room

    # -- a request's way ---------------------------------------------------------------------------------------------

    def admit(self, req: Request) -> None:
        """Admit a request, of which only the first token is computed here. A pooled request has no other half."""
        if req.rendezvous is None and not req.params.pooling:
            raise InvalidRequest(
                "this server computes prompts for decode servers: bootstrap_host, bootstrap_port and bootstrap_room "
                "have to say for which",
                code="room_missing",
                param="bootstrap_room",
            )
        if self._resting and req.rendezvous:
            raise Unavailable(ASLEEP.message, code=ASLEEP.code)
        super().admit(req)
        req.params = replace(req.params, max_tokens=1)
        req.max_kv_len = req.num_prompt

    def enqueue(self, req: Request, now: float) -> None:
        """Put a request without a rendezvous into the waiting queue; others wait for the offer of a decode engine."""
        if req.rendezvous is None:
            self.queues.enqueue(req)
            return
        self.queues.wait_for_peer(req)
        self._rooms[room_of(req).room] = req
        self.matches.expect(req)
        if self.queues.admits:
            self.matches.find(req)

    def _start(self, offered: Offered, req: Request) -> None:
        """Let a request run whose other half has offered places."""
        page_size = self.queues.config.page_size
        start = offered.start // page_size * page_size
        self._begin(_Sending(offered.ticket, req, start=start, next=start), req)
        self.queues.remove(req)
        req.move(Status.WAITING)
        self.queues.enqueue(req)

    def ended(self, req: Request, failure: Failure | None) -> None:
        super().ended(req, failure)
        self.matches.ended(req, failure or ABORTED)

    def computed(self, req: Request) -> None:
        if sending := self._sending(req):
            allocation, page_size = req.allocation, self.queues.config.page_size
            stop = allocation.kv_committed // page_size * page_size
            if stop > sending.next:
                allocation.ticket = sending
                self.tickets.send(
                    Send(ticket=sending.ticket, spans=self.queues.pools.kv_places(allocation, sending.next, stop))
                )
                sending.next = stop

    def defer_end(self, req: Request, reason: FinishReason, update: Update | None) -> bool:
        """Send the request's first token, which is the tail of the transfer."""
        sending = self._sending(req)
        if sending is None or sending.settled or update is None or reason in (FinishReason.ABORT, FinishReason.ERROR):
            return False
        last = self.outputs.updates.pop()
        assert last is update, f"{last} was recorded after {update}"
        if req.maybe_allocation is None:  # retracted while its last chunk was computed, whose KV is lost
            req.tokens.pop()
            self.queues.num_waiting_tokens -= 1
            return True
        allocation, memory = req.allocation, self.queues.memory
        sending.deadline = req.last_progress + self._options.lease_s
        self.queues.transfer(req)
        memory.prefixes.adopt(req, req.num_prompt, last=True)
        allocation.ticket, sending.whole = sending, True
        sending.update, sending.reason = update, reason
        tail = Tail(
            num_tokens=req.num_prompt,
            token_id=update.token_ids[0],
            cache=update.cache or Tail.cache,
            logprob=update.logprobs[0] if update.logprobs else None,
            prompt_logprobs=update.prompt_logprobs,
        )
        self.tickets.send(
            Send(ticket=sending.ticket, spans=memory.pools.places(allocation, sending.start, sending.next), tail=tail)
        )
        memory.allocator.release(req)
        return True

    def _sending(self, req: Request) -> _Sending | None:
        return cast(_Sending | None, self._of.get(req.id))

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _take(self, event: Event, open_ticket: OpenTicket | None, now: float) -> None:
        match event:
            case Offered() if open_ticket is None:
                self.matches.offered(event, now)
            case Sent() if open_ticket and open_ticket.req:
                self._sent(cast(_Sending, open_ticket), open_ticket.req)
            case Broken() if open_ticket:
                self._fail(open_ticket, event.failure)
            case Broken() | Closed():
                self.matches.discard(event.ticket)
            case _:
                pass

    def _sent(self, sending: _Sending, req: Request) -> None:
        if sending.update is None:
            self._fail(sending, Failure.of(EngineError("decode has all before all was sent", code="transfer_lost")))
            return
        sending.settled = True
        self.outputs.updates.append(sending.update)
        self.outputs.finish(req, sending.reason, update=sending.update)

    def _close(self, open_ticket: OpenTicket, now: float) -> None:
        super()._close(open_ticket, now)
        if open_ticket.req and not open_ticket.settled:
            self._fail(open_ticket, LOST)

    # -- time --------------------------------------------------------------------------------------------------------

    def overdue(self, req: Request, now: float) -> ForebayError | None:
        limit, sending = self._options.bootstrap_timeout_s, self._sending(req)
        if req.status is Status.PENDING and now - req.arrival > limit:
            return RequestTimeout(
                f"no decode server has offered places for the request within {limit:g} s", code="bootstrap_timeout"
            )
        if sending and now > sending.deadline:
            return RequestTimeout(
                f"what was computed has not arrived within {self._options.lease_s:g} s", code="lease_timeout"
            )
        return None

    def expire(self, now: float) -> None:
        self.matches.expire(now)

    # -- asleep ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        super().drain()
        if self._resting and not self._refuses:
            self._refuses = True
            self.tickets.orders.append(Rest(asleep=True))
            self.matches.refuse_all()

    def resume(self) -> None:
        if self._refuses:
            self._refuses = False
            self.tickets.orders.append(Rest(asleep=False))
        for req in [*self.queues.pending]:
            self.matches.find(req)

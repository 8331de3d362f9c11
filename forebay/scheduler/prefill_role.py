"""The role of an engine that computes prompts and the first token behind each.

A request is pending until decode has offered places for its prompt, which may come first and wait for it; then it runs
as any other. Whole pages go as their steps commit; the rest, and the first token, when that is known. The request's
memory is then let go of behind its ticket, and its end is told when all has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from forebay.base.errors import EngineError, ForebayError, InvalidRequest, NotFound, RequestTimeout, Unavailable
from forebay.config.engine_config import DisaggregationOptions
from forebay.requests.request import Request, Status
from forebay.requests.transfers import (
    AdapterIdentity,
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
from forebay.scheduler.early_offers import EarlyOffers, MatchKey, adapter_of, key_of_offer, key_of_request, room_of
from forebay.scheduler.handoff import ABORTED, ASLEEP, LOST, OpenTicket, Role
from forebay.scheduler.limits import most_requests


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
        self._early = EarlyOffers()
        self._unheard: set[Request] = set()  # of whose other half nothing has come
        self._over: dict[MatchKey, tuple[Failure, float]] = {}  # why such ended, and until when that is remembered
        self._refuses = False  # and decode knows it

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
        if self._rests and req.rendezvous:
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
        self._unheard.add(req)
        if self.queues.admits:
            self._find_offer(req)

    def _find_offer(self, req: Request) -> None:
        if offered := self._early.take(key_of_request(req)):
            self._match(offered, req)

    def _match(self, offered: Offered, req: Request) -> None:
        """The request may run, unless decode's half has ended, or its tokens would be of other weights or of another
        adapter."""
        self._unheard.discard(req)
        if offered.declined:
            self.outputs.finish(req, FinishReason.ERROR, offered.declined)
            return
        if offered.weight_version != self.queues.weight_version:
            self._refuse(offered, req, _other_weights(self.queues.weight_version, offered.weight_version))
            return
        if offered.adapter != adapter_of(req):
            self._refuse(offered, req, _other_adapter(str(adapter_of(req)), offered.adapter))
            return
        page_size = self.queues.config.page_size
        start = offered.start // page_size * page_size
        self._begin(_Sending(offered.ticket, req, start=start, next=start), req)
        self.queues.remove(req)
        req.move(Status.WAITING)
        self.queues.enqueue(req)

    def ended(self, req: Request, failure: Failure | None) -> None:
        """Answer or remember the other half of an ended request. An offer that was kept would be taken for the next
        request's in that room."""
        super().ended(req, failure)
        if req not in self._unheard:
            return
        self._unheard.remove(req)
        why = failure or ABORTED
        if offered := self._early.take(key_of_request(req)):
            self._answer(offered, why)
            return
        if len(self._over) >= most_requests(self.queues.config):
            del self._over[next(iter(self._over))]
        self._over[key_of_request(req)] = why, req.arrival + 2 * self._options.bootstrap_timeout_s

    def computed(self, req: Request) -> None:
        if sending := self._sending(req):
            held, page_size = req.allocation, self.queues.config.page_size
            stop = held.kv_committed // page_size * page_size
            if stop > sending.next:
                held.ticket = sending
                self._send(Send(ticket=sending.ticket, spans=self.queues.pools.kv_places(held, sending.next, stop)))
                sending.next = stop

    def defer_end(self, req: Request, reason: FinishReason, update: Update | None) -> bool:
        """Send the request's first token, which is the tail of the transfer."""
        sending = self._sending(req)
        if sending is None or sending.settled or update is None or reason in (FinishReason.ABORT, FinishReason.ERROR):
            return False
        told = self.outputs.updates.pop()
        assert told is update, f"{told} was told behind {update}"
        if req.held is None:  # it gave way while its last chunk was computed, and what that wrote is gone
            req.tokens.pop()
            self.queues.num_waiting_tokens -= 1
            return True
        held, memory = req.allocation, self.queues.memory
        sending.deadline = req.last_progress + self._options.lease_s
        self.queues.transfer(req)
        memory.prefixes.adopt(req, req.num_prompt, last=True)
        held.ticket, sending.whole = sending, True
        sending.update, sending.reason = update, reason
        tail = Tail(
            num_tokens=req.num_prompt,
            token_id=update.token_ids[0],
            cache=update.cache or Tail.cache,
            logprob=update.logprobs[0] if update.logprobs else None,
            prompt_logprobs=update.prompt_logprobs,
        )
        self._send(Send(ticket=sending.ticket, spans=memory.pools.places(held, sending.start, sending.next), tail=tail))
        memory.allocator.release(req)
        return True

    def _send(self, send: Send) -> None:
        self._tickets[send.ticket].named.append(send.spans)
        self._orders.append(send)

    def _sending(self, req: Request) -> _Sending | None:
        return cast(_Sending | None, self._of.get(req.id))

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _take(self, event: Event, open_ticket: OpenTicket | None, now: float) -> None:
        match event:
            case Offered() if open_ticket is None:
                self._offered(event, now)
            case Sent() if open_ticket and open_ticket.req:
                self._sent(cast(_Sending, open_ticket), open_ticket.req)
            case Broken() if open_ticket:
                self._fail(open_ticket, event.failure)
            case Broken() | Closed():
                self._early.discard(event.ticket)
            case _:
                pass

    def _offered(self, offered: Offered, now: float) -> None:
        if not 0 <= offered.start < offered.num_tokens:
            what = f"the offer begins at token {offered.start} of {offered.num_tokens}"
            self._answer(offered, Failure.of(EngineError(what, code="transfer_lost")))
            return
        req = self._rooms.get(offered.ticket.room)
        if req not in self._unheard or not _is_of(offered, req):
            req = None
        # Of two requests of one prompt in one room, the half of the first is declined first.
        over = self._over.pop(key_of_offer(offered), None) if offered.declined or not req else None
        if over:
            self._answer(offered, over[0])
            return
        if self._rests:
            self._refuse(offered, req, ASLEEP)
            return
        name = offered.adapter.name
        if name and not (req or name in self.queues.pools.adapters):  # no request can name it here
            self._answer(offered, _no_adapter(name))
            return
        if req and (self.queues.admits or offered.declined):
            self._match(offered, req)
            return
        if len(self._early) >= most_requests(self.queues.config):
            self._turn_down(self._early.take_oldest())
        self._early.add(offered, now + self._options.bootstrap_timeout_s)

    def _refuse(self, offered: Offered, req: Request | None, why: Failure) -> None:
        self._answer(offered, why)
        if req:
            self._unheard.discard(req)
            self.outputs.finish(req, FinishReason.ERROR, why)

    def _turn_down(self, offered: Offered | None) -> None:
        if offered is None:
            return
        message = f"no request of that prompt has come to bootstrap_room {offered.ticket.room} of the prefill server"
        self._answer(offered, Failure.of(RequestTimeout(message, code="bootstrap_timeout")))

    def _answer(self, offered: Offered, why: Failure) -> None:
        """Nothing will come of it, which decode knows of a half that it declines."""
        if not offered.declined:
            self._withdraw(offered.ticket, why)

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
        for offered in self._early.take_overdue(now):
            self._turn_down(offered)
        self._over = {half: (why, until) for half, (why, until) in self._over.items() if now <= until}

    # -- asleep ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        super().drain()
        if self._rests and not self._refuses:
            self._refuses = True
            self._orders.append(Rest(asleep=True))
            for offered in self._early:
                self._refuse(offered, None, ASLEEP)
            self._early.clear()

    def resume(self) -> None:
        if self._refuses:
            self._refuses = False
            self._orders.append(Rest(asleep=False))
        for req in [*self.queues.pending]:
            self._find_offer(req)


def _other_weights(ours: int, theirs: int) -> Failure:
    what = f"weight_version: prefill has {ours}, decode {theirs}"
    return Failure.of(Unavailable(f"prefill and decode do not fit together: {what}", code="layout_mismatch"))


def _no_adapter(name: str) -> Failure:
    """Make the refusal with the code of prefill's own server, since the client gets whichever comes first."""
    what = f"the adapter {name!a} is not loaded on the prefill server: load it on both"
    return Failure.of(NotFound(what, code="model_not_found", param="model"))


def _other_adapter(ours: str, theirs: AdapterIdentity) -> Failure:
    what = f"adapter: prefill has {ours}, decode {theirs}: load the same files on both"
    return Failure.of(Unavailable(f"prefill and decode do not fit together: {what}", code="adapter_mismatch"))


def _is_of(offered: Offered, req: Request) -> bool:
    """Whether the offer is for this request, whose own prompt it has to name."""
    return key_of_offer(offered) == key_of_request(req)

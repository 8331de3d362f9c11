"""Matches of a prefill engine's requests with the offers of decode engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.base.errors import EngineError, NotFound, RequestTimeout, Unavailable
from forebay.config.engine_config import DisaggregationOptions
from forebay.requests.request import Request
from forebay.requests.transfers import AdapterIdentity, Offered, Ticket
from forebay.requests.updates import Failure, FinishReason
from forebay.scheduler.early_offers import EarlyOffers, MatchKey, adapter_of, key_of_offer, key_of_request, pictures_of
from forebay.scheduler.handoff import ASLEEP, Outputs
from forebay.scheduler.limits import most_requests
from forebay.scheduler.queues import Queues
from forebay.scheduler.tickets import Tickets


class Matches:
    """Requests without an offer, offers without a request, and the ends of requests whose offers are still to come.

    `matched` is called with each offer and its request, `refuses` tells whether offers are refused, and `in_room` finds
    the request in a room.
    """

    def __init__(
        self,
        options: DisaggregationOptions,
        queues: Queues,
        outputs: Outputs,
        tickets: Tickets,
        *,
        matched: Callable[[Offered, Request], None],
        refuses: Callable[[], bool],
        in_room: Callable[[object], Request | None],
    ) -> None:
        self._options, self.queues, self.outputs, self._tickets = options, queues, outputs, tickets
        self._matched, self._refuses, self._in_room = matched, refuses, in_room
        self._early = EarlyOffers()
        self._expected: set[Request] = set()  # without an offer
        self._over: dict[MatchKey, tuple[Failure, float]] = {}  # why such ended, and until when that is remembered

    def expect(self, req: Request) -> None:
        """Add a request without an offer."""
        self._expected.add(req)

    def find(self, req: Request) -> None:
        """Match a request with its offer if that has come."""
        if offered := self._early.take(key_of_request(req)):
            self._match(offered, req)

    def _match(self, offered: Offered, req: Request) -> None:
        """The request may run, unless decode's half has ended, or its tokens would be of other weights, of another
        adapter or of other pictures."""
        self._expected.discard(req)
        if offered.declined:
            self.outputs.finish(req, FinishReason.ERROR, offered.declined)
            return
        if offered.weight_version != self.queues.weight_version:
            self._refuse(offered, req, _other_weights(self.queues.weight_version, offered.weight_version))
            return
        if offered.adapter != adapter_of(req):
            self._refuse(offered, req, _other_adapter(str(adapter_of(req)), offered.adapter))
            return
        if offered.pictures != pictures_of(req):
            self._refuse(offered, req, _other_pictures(pictures_of(req), offered.pictures))
            return
        self._matched(offered, req)

    def ended(self, req: Request, why: Failure) -> None:
        """Answer or remember the other half of an ended request. An offer that was kept would be taken for the next
        request's in that room."""
        if req not in self._expected:
            return
        self._expected.remove(req)
        if offered := self._early.take(key_of_request(req)):
            self._answer(offered, why)
            return
        if len(self._over) >= most_requests(self.queues.config):
            del self._over[next(iter(self._over))]
        self._over[key_of_request(req)] = why, req.arrival + 2 * self._options.bootstrap_timeout_s

    def discard(self, ticket: Ticket) -> None:
        """Remove an offer that its decode engine has withdrawn."""
        self._early.discard(ticket)

    def refuse_all(self) -> None:
        """Refuse all offers without a request, since this engine admits none."""
        for offered in self._early:
            self._refuse(offered, None, ASLEEP)
        self._early.clear()

    def expire(self, now: float) -> None:
        """Turn down offers whose request has not come in time."""
        for offered in self._early.take_overdue(now):
            self._turn_down(offered)
        self._over = {half: (why, until) for half, (why, until) in self._over.items() if now <= until}

    def offered(self, offered: Offered, now: float) -> None:
        """Match an offer with its request, or keep it until that comes."""
        if not 0 <= offered.start < offered.num_tokens:
            what = f"the offer begins at token {offered.start} of {offered.num_tokens}"
            self._answer(offered, Failure.of(EngineError(what, code="transfer_lost")))
            return
        req = self._request_of(offered)
        # Of two requests of one prompt in one room, the half of the first is declined first.
        over = self._over.pop(key_of_offer(offered), None) if offered.declined or not req else None
        if over:
            self._answer(offered, over[0])
            return
        if self._refuses():
            self._refuse(offered, req, ASLEEP)
            return
        name = offered.adapter.name
        if name and not (req or name in self.queues.pools.adapters):  # no request can name it here
            self._answer(offered, _no_adapter(name))
            return
        if req and (self.queues.admits or offered.declined):
            self._match(offered, req)
            return
        self._keep(offered, now)

    def _request_of(self, offered: Offered) -> Request | None:
        req = self._in_room(offered.ticket.room)
        return req if req in self._expected and _is_of(offered, req) else None

    def _keep(self, offered: Offered, now: float) -> None:
        """Keep an offer whose request has not come yet, within a bound."""
        if len(self._early) >= most_requests(self.queues.config):
            self._turn_down(self._early.take_oldest())
        self._early.add(offered, now + self._options.bootstrap_timeout_s)

    def _refuse(self, offered: Offered, req: Request | None, why: Failure) -> None:
        self._answer(offered, why)
        if req:
            self._expected.discard(req)
            self.outputs.finish(req, FinishReason.ERROR, why)

    def _turn_down(self, offered: Offered | None) -> None:
        if offered is None:
            return
        message = f"no request of that prompt has come to bootstrap_room {offered.ticket.room} of the prefill server"
        self._answer(offered, Failure.of(RequestTimeout(message, code="bootstrap_timeout")))

    def _answer(self, offered: Offered, why: Failure) -> None:
        """Nothing will come of it, which decode knows of a half that it declines."""
        if not offered.declined:
            self._tickets.withdraw(offered.ticket, why)


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


def _other_pictures(ours: Sequence[bytes], theirs: Sequence[bytes]) -> Failure:
    if len(ours) != len(theirs):
        what = f"{len(ours)} images were read on the prefill server and {len(theirs)} on the decode server"
    else:
        number = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True), 1) if one != other)
        what = f"image {number} of {len(ours)} has other pixels on the prefill server than on the decode server"
    return Failure.of(
        Unavailable(f"{what}: send images as data, or by URLs that answer alike each time", code="images_differ")
    )


def _is_of(offered: Offered, req: Request) -> bool:
    """Whether the offer is for this request, whose own prompt it has to name."""
    return key_of_offer(offered) == key_of_request(req)

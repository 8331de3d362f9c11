"""A scheduler in a role, alone: whoever asks it for something, and what its transfers would tell."""

import pytest

from forebay.base.errors import EngineError, InvalidRequest
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions
from forebay.requests.transfers import Arrived, Closed, Offer, Offered, Rendezvous, Tail, Ticket, digest_of
from forebay.requests.updates import Failure
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.prefill_role import PrefillRole
from tests.scheduler.rig import Rig

BROKEN = Failure.of(EngineError("the peer has died", code="peer_lost"))


class Half(Rig):
    """A scheduler with a role; its orders pile up in `orders`."""

    def __init__(self, mode: DisaggregationMode, *, extra: int = 2, reserved: int = 0, **changes) -> None:
        options = DisaggregationOptions(mode=mode, decode_extra_slots=extra, num_reserved_decode_tokens=reserved)
        role = DecodeRole(options, "d") if options.is_decode else PrefillRole(options)
        super().__init__(handoff=role, disaggregation=options, **changes)
        self.orders = []

    def meet(self, prompt, room: int = 5, max_new: int = 4, **kw):
        return self.add(prompt, max_new, rendezvous=Rendezvous("host", 1, room, b"n%d" % room), **kw)

    def hear(self, event):
        self.scheduler.handoff.take(event, self.now)
        news = self.scheduler.take_updates()
        self.updates += news
        self.take_orders()
        return news

    def take_orders(self):
        new = self.scheduler.handoff.tickets.take_orders()
        self.orders += new
        return new

    def step(self):
        plan = super().step()
        self.take_orders()
        return plan

    def quarantined(self):
        return {pool.name: pool.quarantined for pool in self.scheduler.state(self.now).pools if pool.quarantined}

    def failure_of(self, req):
        return next((u.failure.code for u in self.updates if u.request_id == req.id and u.failure), None)


def prefill(**changes) -> Half:
    return Half(DisaggregationMode.PREFILL, **changes)


def decode(**changes) -> Half:
    return Half(DisaggregationMode.DECODE, **changes)


def offered(req, *, start: int = 0, room: int = 0) -> Offered:
    room = room or req.rendezvous.room
    return Offered(Ticket("d", room, b"n"), req.num_prompt, digest_of(req.tokens), start)


def refused(code: str, add, *args, **kw) -> None:
    with pytest.raises(InvalidRequest) as raised:
        add(*args, **kw)
    assert raised.value.code == code


def late(half: Half, now: float) -> None:
    half.updates += half.expire(now)
    half.take_orders()


def arrive(half: Half, offer: Offer, token: int = 50, **tail):
    half.hear(Arrived(offer.ticket, Tail(offer.num_tokens, token, **tail)))
    return half.hear(Closed(offer.ticket))

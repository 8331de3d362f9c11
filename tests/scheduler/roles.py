"""A scheduler in a role, alone: whoever asks it for something, and what its transfers would tell."""

from collections.abc import Callable
from typing import Any

import pytest

from forebay.base.errors import EngineError, InvalidRequest
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions
from forebay.requests.request import Request
from forebay.requests.step_plan import StepPlan
from forebay.requests.transfers import Arrived, Closed, Offer, Offered, Rendezvous, Tail, Ticket, digest_of
from forebay.requests.updates import Failure, Update
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.prefill_role import PrefillRole
from tests.scheduler.rig import Rig

BROKEN = Failure.of(EngineError("the peer has died", code="peer_lost"))


class Half(Rig):
    """A scheduler with a role; its orders pile up in `orders`."""

    def __init__(self, mode: DisaggregationMode, *, extra: int = 2, reserved: int = 0, **changes: Any) -> None:
        options = DisaggregationOptions(mode=mode, decode_extra_slots=extra, num_reserved_decode_tokens=reserved)
        role = DecodeRole(options, "d") if options.is_decode else PrefillRole(options)
        super().__init__(handoff=role, disaggregation=options, **changes)
        self.orders: list[Any] = []

    def meet(self, prompt: list[int] | int, room: int = 5, max_new: int = 4, **kw: Any) -> Request:
        return self.add(prompt, max_new, rendezvous=Rendezvous("host", 1, room, b"n%d" % room), **kw)

    def hear(self, event: Any) -> list[Update]:
        self.scheduler.handoff.take(event, self.now)
        news = self.scheduler.take_updates()
        self.updates += news
        self.take_orders()
        return news

    def take_orders(self) -> list[Any]:
        new: list[Any] = self.scheduler.handoff.tickets.take_orders()
        self.orders += new
        return new

    def step(self) -> StepPlan | None:
        plan = super().step()
        self.take_orders()
        return plan

    def quarantined(self) -> dict[str, int]:
        return {pool.name: pool.quarantined for pool in self.scheduler.state(self.now).pools if pool.quarantined}

    def failure_of(self, req: Request) -> str | None:
        return next((u.failure.code for u in self.updates if u.request_id == req.id and u.failure), None)


def prefill(**changes: Any) -> Half:
    return Half(DisaggregationMode.PREFILL, **changes)


def decode(**changes: Any) -> Half:
    return Half(DisaggregationMode.DECODE, **changes)


def offered(req: Request, *, start: int = 0, room: int = 0) -> Offered:
    if not room:
        assert req.rendezvous is not None
        room = req.rendezvous.room
    return Offered(Ticket("d", room, b"n"), req.num_prompt, digest_of(req.tokens), start)


def refused(code: str, add: Callable[..., object], *args: Any, **kw: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        add(*args, **kw)
    assert raised.value.code == code


def late(half: Half, now: float) -> None:
    half.updates += half.expire(now)
    half.take_orders()


def arrive(half: Half, offer: Offer, token: int = 50, **tail: Any) -> list[Update]:
    half.hear(Arrived(offer.ticket, Tail(offer.num_tokens, token, **tail)))
    return half.hear(Closed(offer.ticket))

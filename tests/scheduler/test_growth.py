"""Calls of the scheduler do work for what they decide, and not for all that waits: counted in function calls.

`python -m benchmarks.growth` measures the same at full size in milliseconds.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from forebay.requests.request import Status
from forebay.requests.transfers import Offer, Offered, Ticket, digest_of
from forebay.scheduler.arrivals import HANDOVERS_PER_PLAN
from tests.scheduler.roles import arrive, decode, prefill


def num_calls(call: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, run in `call`."""
    count = 0

    def counting(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def decode_with(num_pending: int):
    """A decode engine with four running requests and this many pending ones."""
    half = decode(num_pages=2000, max_running_requests=4, extra=num_pending, max_queued_requests=2000)
    for _ in range(4):
        half.add(5, 50)
    half.step()
    for room in range(num_pending):
        half.meet([900 + room, 1, 2, 3, 4], room=room + 1)
    return half


def test_decode_role_plan_with_many_pending_offers_a_few_at_a_time_in_their_order():
    half = decode_with(3 * HANDOVERS_PER_PLAN)
    rooms: list[int] = []
    for _ in range(3):
        half.orders.clear()
        half.step()
        offers = [order.ticket.room for order in half.orders if isinstance(order, Offer)]
        assert len(offers) == HANDOVERS_PER_PLAN
        rooms += offers
    assert rooms == list(range(1, 3 * HANDOVERS_PER_PLAN + 1))


def test_decode_role_plan_that_stopped_before_the_last_offer_has_orders_and_so_the_loop_goes_on():
    half = decode(num_pages=2000, extra=100)
    for room in range(HANDOVERS_PER_PLAN + 1):
        half.meet(5, room=room + 1)
    assert half.scheduler.plan(0.0) is None, "nothing runs"
    assert half.scheduler.handoff.tickets.has_orders
    assert len(half.scheduler.handoff.tickets.take_orders()) == HANDOVERS_PER_PLAN
    assert not half.scheduler.handoff.tickets.has_orders


def test_decode_role_plan_costs_the_same_with_ten_times_as_many_pending():
    few, many = decode_with(2 * HANDOVERS_PER_PLAN), decode_with(20 * HANDOVERS_PER_PLAN)
    costs = [num_calls(partial(half.scheduler.plan, 0.0)) for half in (few, many)]
    assert costs[1] <= 1.02 * costs[0], costs


def test_decode_role_offers_account_for_the_offers_of_the_same_plan():
    """C22: places that are offered in one plan leave each running request all that it may ever need."""
    half = decode(num_pages=30, max_running_requests=4, extra=100, page_size=4)
    half.add(4, 37)  # 10 pages at its end
    half.step()
    for room in range(6):
        half.meet([room, *range(15)], max_new=1, room=room + 1)  # 4 pages each
    half.step()
    assert sum(isinstance(order, Offer) for order in half.orders) == 5, "4 x 5 + 10 pages of 30"


def test_decode_role_arrivals_begin_to_decode_a_few_at_a_time_in_their_order():
    half = decode(num_pages=2000, max_running_requests=100, extra=100)
    reqs = [half.meet(5, room=room + 1) for room in range(2 * HANDOVERS_PER_PLAN)]
    while not all(req.status is Status.TRANSFERRING for req in reqs):
        half.step()
    for offer in [order for order in half.orders if isinstance(order, Offer)]:
        arrive(half, offer)
    for n in (1, 2):
        half.step()
        assert [req.status is Status.DECODING for req in reqs].count(True) == n * HANDOVERS_PER_PLAN
    assert all(req.status is Status.DECODING for req in reqs)


@pytest.mark.parametrize("call", ["add", "broken", "expire"])
def test_prefill_role_call_costs_the_same_with_a_hundred_times_as_many_early_offers(call):
    costs, prompt = [], list(range(12))
    for num_early in (10, 1000):
        half = prefill(max_queued_requests=2000)
        for room in range(num_early):
            digest = digest_of(array("i", prompt)) if room == num_early - 1 else b"other"
            half.scheduler.handoff.take(Offered(Ticket("d", room, b"n"), 12, digest, 0), 0.0)
        role, last = half.scheduler.handoff, num_early - 1
        calls = {
            "add": partial(half.meet, prompt, room=last),
            "broken": partial(role.matches._early.discard, Ticket("d", last, b"n")),
            "expire": partial(role.expire, 1.0),
        }
        costs.append(num_calls(calls[call]))
    assert costs[1] <= costs[0] + 20, f"{costs} calls, a few of which may be those of the garbage collector"

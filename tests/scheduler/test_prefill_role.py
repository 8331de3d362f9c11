"""Prefill, alone: what it refuses, computes, sends, waits for and keeps out of use (C2, C8, C21, C22, C27)."""

from array import array

import msgspec
import pytest

from forebay.base.errors import Unavailable
from forebay.requests.request import Status
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.transfers import Broken, Closed, Offered, Rest, Send, Sent, Ticket, Withdraw, digest_of
from forebay.requests.updates import FinishReason
from forebay.scheduler.early_offers import EarlyOffers, key_of_offer
from forebay.scheduler.halt import Halt, Mode, resume
from forebay.scheduler.handoff import ASLEEP
from forebay.scheduler.limits import most_requests
from tests.scheduler.roles import BROKEN, late, offered, prefill, refused


def test_prefill_refuses_who_has_no_room_and_who_takes_one_in_use():
    half = prefill()
    refused("room_missing", half.add, 3)
    req = half.meet(3)
    refused("room_in_use", half.meet, 4)
    half.abort(req.id)
    half.reqs[9] = half.meet(4)


def test_prefill_computes_all_of_a_prompt_that_becomes_a_vector():
    half, pooled = prefill(), SamplingParams.of_pooling(Pooling(PoolingKind.MEAN))
    refused("invalid_value", half.meet, 3, params=pooled)
    req = half.add(6, params=pooled)
    plan = half.launch()
    assert (plan.pooled, plan.sample_mask.tolist()) == ((0,), [False])
    (told,) = half.commit(vectors={0: b"vector"})
    assert (told.vector, told.finish, told.token_ids) == (b"vector", FinishReason.STOP, [])
    assert half.scheduler.idle
    assert (req.status, half.orders) == (Status.FINISHED, [])


def test_prefill_runs_behind_an_offer_sends_whole_pages_then_the_rest_and_ends_when_all_has_arrived():
    half = prefill(chunked_prefill_size=6)
    req = half.meet(10, params=SamplingParams(max_tokens=50))
    assert half.step() is None
    half.hear(offered(req))
    half.step()
    (first,) = half.orders
    assert (first.spans["kv"].start, len(first.spans["kv"].ids), first.tail) == (0, 1, None)
    half.step()
    *_, whole, last = half.orders
    assert (whole.spans["kv"].start, last.spans["kv"].start, len(last.spans["kv"].ids)) == (4, 8, 1)
    assert (last.tail.num_tokens, last.tail.token_id) == (10, 1000)
    assert req.status is Status.TRANSFERRING
    assert not half.updates
    (told,) = half.hear(Sent(last.ticket))
    assert (told.token_ids, told.finish) == ([1000], FinishReason.LENGTH)
    assert half.hear(Sent(last.ticket)) == []
    half.hear(Closed(last.ticket))
    assert half.scheduler.pools.deferred.entries == []
    assert not any(isinstance(order, Withdraw) for order in half.orders)


def test_an_offer_begins_where_decode_has_nothing_and_may_come_before_its_request():
    half = prefill()
    tokens = list(range(12))
    half.hear(Offered(Ticket("d", 5, b"n"), 12, digest_of(array("i", tokens)), 8))
    req = half.meet(tokens)
    assert req.status is Status.WAITING
    half.step()
    assert [order.spans["kv"].start for order in half.orders] == [8, 12]


@pytest.mark.parametrize("start", [12, 13, -1, -4])
def test_prefill_role_offer_that_starts_outside_its_prompt_is_refused_at_once(start):
    """C33"""
    half = prefill()
    req = half.meet(list(range(12)))
    half.hear(Offered(Ticket("d", 5, b"n"), 12, digest_of(req.tokens), start))
    assert [order.failure.code for order in half.orders] == ["transfer_lost"]
    assert req.status is Status.PENDING, "the right offer may still arrive"


@pytest.mark.parametrize("change", [{"digest": b"other"}, {"num_tokens": 11}])
def test_an_offer_that_is_not_of_this_prompt_waits_and_is_turned_down(change):
    half = prefill()
    req = half.meet(list(range(12)))
    values = {"num_tokens": 12, "digest": digest_of(req.tokens), "start": 0, **change}
    half.hear(Offered(Ticket("d", 5, b"n"), **values))
    assert req.status is Status.PENDING
    late(half, 16.0)
    assert half.failure_of(req) == "bootstrap_timeout"
    (turned_down,) = half.orders
    assert turned_down.failure.code == "bootstrap_timeout"


def test_only_so_many_offers_wait_and_one_that_is_broken_does_not():
    half = prefill(max_running_requests=1, max_queued_requests=1)
    tickets = [Ticket("d", room, b"n") for room in range(4)]
    for ticket in tickets[:3]:
        half.hear(Offered(ticket, 3, b"x", 0))
    assert [order.ticket for order in half.orders] == tickets[:1]
    half.hear(Broken(tickets[1], BROKEN))
    half.hear(Closed(tickets[2]))
    half.hear(Offered(tickets[3], 3, b"x", 0))
    assert len(half.orders) == 1


def test_what_prefill_has_sent_is_out_of_use_until_the_ticket_is_closed_however_it_ends():
    half = prefill(radix_cache=False)
    req = half.meet(10)
    half.hear(offered(req))
    half.step()
    ticket = half.orders[-1].ticket
    (told,) = half.hear(Broken(ticket, BROKEN))
    assert told.failure.code == "peer_lost"
    assert half.quarantined() == {"kv": 3, "rows": 1}
    half.scheduler.audit()
    assert half.scheduler.reclaim_leaks() == 0
    half.hear(Closed(ticket))
    assert half.quarantined() == {}
    assert half.free_pages == 64


def test_prefill_gives_up_what_does_not_arrive_and_what_is_closed_or_sent_too_early():
    half = prefill()
    reqs = [half.meet(3 + room, room=room) for room in range(1, 4)]
    for req in reqs:
        half.hear(offered(req))
    half.hear(Sent(Ticket("d", 1, b"n")))
    half.hear(Closed(Ticket("d", 2, b"n")))
    half.step()
    late(half, 31.0)
    assert [half.failure_of(req) for req in reqs] == ["transfer_lost", "transfer_lost", "lease_timeout"]
    assert [type(order) for order in half.orders] == [Send, Send, Withdraw]


def test_who_fails_or_is_aborted_tells_decode():
    half = prefill(chunked_prefill_size=4)
    reqs = [half.meet(10, room=room) for room in (1, 2)]
    for req in reqs:
        half.hear(offered(req))
    half.step()
    half.abort(reqs[0].id)
    half.launch()
    half.commit(failed=(0,))
    withdrawn = {order.ticket.room: order.failure.code for order in half.take_orders() if isinstance(order, Withdraw)}
    assert withdrawn == {1: "aborted", 2: "non_finite_logits"}


def test_a_prefill_engine_that_rests_says_so_and_refuses_offers_and_requests_at_once():
    half = prefill(max_running_requests=1)
    half.hear(Offered(Ticket("d", 9, b"n"), 3, b"x", 0))  # before its request
    runs, waits, alone = (half.meet(10 + room, room=room) for room in (1, 2, 3))
    for req in (runs, waits):
        half.hear(offered(req))
    half.step()
    halt = Halt(half.scheduler, Mode.WAIT)
    half.updates += half.scheduler.take_updates()
    withdrawn = {order.ticket.room for order in half.take_orders() if isinstance(order, Withdraw)}
    assert (withdrawn, half.failure_of(waits), half.failure_of(runs)) == ({2, 9}, "peer_asleep", None)
    assert [order.asleep for order in half.orders if isinstance(order, Rest)] == [True]
    half.hear(offered(alone))
    assert half.failure_of(alone) == "peer_asleep"
    with pytest.raises(Unavailable) as refused:
        half.meet(3, room=4)
    assert refused.value.code == "peer_asleep"
    half.add(3, params=SamplingParams.of_pooling(Pooling(PoolingKind.LAST)))  # which has no other half, and waits
    assert not halt.done
    ticket = offered(runs).ticket
    half.hear(Sent(ticket))
    assert not halt.done  # what is sent may still be read
    half.hear(Closed(ticket))
    assert not halt.done
    half.hear(Closed(offered(waits).ticket))
    assert halt.done
    resume(half.scheduler, half.now)
    assert [order.asleep for order in half.take_orders() if isinstance(order, Rest)] == [False]
    half.hear(offered(half.meet(3, room=4)))


def test_prefill_ends_who_waits_for_an_offer_that_will_not_come_and_who_comes_later():
    half = prefill()
    first, other = half.meet(3, room=1), half.meet(4, room=2)
    half.hear(msgspec.structs.replace(offered(first), declined=ASLEEP))
    assert (half.failure_of(first), half.failure_of(other)) == ("peer_asleep", None)
    half.hear(msgspec.structs.replace(offered(first, room=3), declined=ASLEEP))
    late = half.meet([*first.tokens], room=3)
    half.updates += half.scheduler.take_updates()
    assert half.failure_of(late) == "peer_asleep"
    assert half.orders == []


def test_prefill_keeps_nothing_that_is_said_of_a_half_that_has_ended_and_refuses_its_offer_at_once():
    half = prefill(max_running_requests=1, max_queued_requests=1)
    for num_ended in range(4):  # more than are kept
        gone = half.meet(3, room=1 + num_ended)
        half.abort(gone.id)
        half.updates += half.scheduler.take_updates()
        declined = msgspec.structs.replace(offered(gone), declined=ASLEEP)
        half.hear(declined)
        again = half.meet([*gone.tokens], room=1 + num_ended)
        assert again.status is Status.PENDING
        half.abort(again.id)
    half.hear(offered(again))
    assert [(type(order), order.failure.code) for order in half.orders] == [(Withdraw, "aborted")]


def test_what_is_declined_late_is_not_meant_for_the_next_request_of_that_prompt_in_that_room_and_its_own_word_is():
    half = prefill()
    gone = half.meet(3)
    half.abort(gone.id)
    req = half.meet([*gone.tokens])
    declined = msgspec.structs.replace(offered(gone), declined=ASLEEP)
    half.hear(declined)
    assert req.status is Status.PENDING
    half.hear(declined)
    assert half.failure_of(req) == "peer_asleep"


def test_prefill_forgets_a_half_that_nobody_has_said_anything_of():
    half = prefill()
    gone = half.meet(3)
    late(half, 16.0)
    assert half.failure_of(gone) == "bootstrap_timeout"
    late(half, 31.0)
    half.hear(offered(gone))
    assert half.orders == []
    half.meet([*gone.tokens])
    half.step()
    assert len(half.orders) == 1


def test_an_offer_that_came_to_an_engine_asleep_is_refused_when_its_request_ends():
    half = prefill()
    half.scheduler.handoff.wakes, half.scheduler.queues.admits = True, False
    req = half.meet(3)
    half.hear(offered(req))
    half.abort(req.id)
    assert [(type(order), order.failure.code) for order in half.take_orders()] == [(Withdraw, "aborted")]


def test_what_wakes_an_engine_may_be_an_offer():
    half = prefill()
    half.scheduler.handoff.wakes = True
    assert Halt(half.scheduler, Mode.WAIT).done
    early, late = half.meet(10, room=1), half.meet(11, room=2)
    half.hear(offered(early))
    assert (half.updates, early.status) == ([], Status.PENDING)
    resume(half.scheduler, half.now)
    half.hear(offered(late))
    assert [early.status, late.status] == [Status.WAITING, Status.WAITING]
    assert not half.orders


def test_c31_an_offer_of_other_weights_that_came_first_ends_its_request_on_arrival():
    half = prefill()
    tokens = list(range(12))
    half.hear(Offered(Ticket("d", 5, b"n"), 12, digest_of(array("i", tokens)), 0, weight_version=1))
    req = half.meet(tokens)
    (told,) = half.scheduler.take_updates()
    assert (told.request_id, told.failure.code) == (req.id, "layout_mismatch")
    assert half.scheduler.idle
    (withdrawn,) = half.take_orders()
    assert withdrawn.failure == told.failure


@pytest.mark.parametrize("num_tokens", [0, 65, 1 << 40])
def test_a_check_of_more_than_there_is_takes_nothing(num_tokens: int) -> None:
    half = prefill()
    with pytest.raises(Unavailable, match="at most 64"):
        half.scheduler.handoff.spare.set_aside(Ticket("d", 0, b"n"), num_tokens)
    half.scheduler.audit()
    assert half.scheduler.pools.deferred.entries == []


def test_early_offers_of_one_half_the_oldest_is_taken_first():
    early = EarlyOffers()
    one, two, other = (
        Offered(Ticket("d", room, nonce), 3, b"p", 0) for room, nonce in ((5, b"1"), (5, b"2"), (6, b"3"))
    )
    for number, offer in enumerate((one, two, other, one)):  # the first comes twice
        early.add(offer, float(number))
    assert [early.take(key_of_offer(one)) for _ in range(3)] == [two, one, None]
    assert (early.take_oldest(), len(early)) == (other, 0)


def test_early_offers_that_were_dropped_are_not_in_the_way_of_later_ones_of_their_key():
    early = EarlyOffers()
    one, two = (Offered(Ticket("d", 5, nonce), 3, b"p", 0) for nonce in (b"1", b"2"))
    early.add(one, 1.0)
    early.clear()
    assert early.take(key_of_offer(one)) is None
    early.add(two, 2.0)
    assert early.take(key_of_offer(two)) is two


def test_prefill_offers_refused_at_rest_are_forgotten():
    half = prefill()
    half.hear(Offered(Ticket("d", 5, b"n"), 3, b"p", 0))
    halt = Halt(half.scheduler, Mode.WAIT)
    assert [order.failure for order in half.take_orders() if isinstance(order, Withdraw)] == [ASLEEP]
    assert halt.done
    resume(half.scheduler, half.now)
    late(half, 1e6)
    assert not [order for order in half.take_orders() if isinstance(order, Withdraw)]
    assert sum(isinstance(order, Withdraw) for order in half.orders) == 1


def test_prefill_request_retracted_at_rest_ends_with_its_ticket():
    """What it named may be read until then, and would be in use for as long as the request waits."""
    half = prefill(chunked_prefill_size=4)
    req = half.meet(10)
    half.hear(offered(req))
    half.step()
    halt = Halt(half.scheduler, Mode.RETRACT)
    for _ in range(2):
        assert halt.plan(half.now) is None
    half.updates += half.scheduler.take_updates()
    assert half.failure_of(req) == "peer_asleep"
    half.hear(Closed(offered(req).ticket))
    assert halt.done


def test_prefill_says_once_that_it_rests():
    half = prefill()
    half.scheduler.queues.admits = False
    for _ in range(2):
        half.scheduler.handoff.drain()
    assert [order.asleep for order in half.take_orders() if isinstance(order, Rest)] == [True]


def test_prefill_offer_that_waits_is_taken_when_requests_may_start_again():
    half = prefill()
    first = half.meet(3)
    offer = offered(first, room=6)
    half.hear(offer)
    half.scheduler.queues.admits, half.scheduler.handoff.wakes = False, True
    req = half.meet([*first.tokens], room=6)
    assert req.status is Status.PENDING
    resume(half.scheduler, half.now)
    assert req.status is Status.WAITING


def test_time_in_which_no_request_could_start_is_no_delay():
    half = prefill()
    req = half.meet(3)
    half.hear(offered(req))
    resume(half.scheduler, 50.0)
    assert req.last_progress == 50.0


def test_prefill_offer_of_a_request_of_the_same_prompt_and_room_as_one_that_ended_is_its_own():
    half = prefill()
    gone = half.meet(3)
    half.abort(gone.id)
    req = half.meet([*gone.tokens])
    half.hear(offered(req))
    assert (req.status, half.orders) == (Status.WAITING, [])


def test_prefill_remembers_only_so_many_halves_that_have_ended():
    half = prefill(max_running_requests=1, max_queued_requests=1)
    gone = [half.meet(3, room=room) for room in range(1)]
    for room in range(1, most_requests(half.scheduler.config) + 1):
        half.abort(gone[-1].id)
        gone.append(half.meet(3, room=room))
    half.abort(gone[-1].id)
    half.hear(offered(gone[0]))
    assert half.orders == []
    half.hear(offered(gone[-1]))
    assert [(type(order), order.failure.code) for order in half.orders] == [(Withdraw, "aborted")]


def test_prefill_sends_from_the_page_in_which_decode_has_its_last_token():
    half = prefill(page_size=4)
    req = half.meet(12)
    half.hear(offered(req, start=6))
    half.step()
    assert [(order.spans["kv"].start, len(order.spans["kv"].ids)) for order in half.orders] == [(4, 2), (12, 0)]


def test_prefill_request_retracted_under_its_last_chunk_computes_its_first_token_again():
    half = prefill()
    req = half.meet(10)
    half.hear(offered(req))
    half.launch()
    half.scheduler.preemption.retract(req)
    half.commit()
    half.take_orders()
    assert (req.num_output, half.updates) == (0, [])
    half.step()
    *_, last = half.orders
    assert (last.tail.num_tokens, last.tail.token_id, req.num_output) == (10, 1000, 1)

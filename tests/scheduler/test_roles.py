"""The two roles, each alone: what it refuses, orders, waits for and keeps out of use (C2, C8, C21, C22, C27)."""

from array import array

import msgspec
import pytest

from forebay.base.errors import EngineError, InvalidRequest, Unavailable
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions, KindConfig, StateStrategy
from forebay.requests.request import Status
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Decline,
    Offer,
    Offered,
    Rendezvous,
    Renewed,
    Rest,
    Send,
    Sent,
    Tail,
    Ticket,
    Withdraw,
    digest_of,
)
from forebay.requests.updates import CacheReport, Failure, FinishReason
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.halt import Halt, Mode, go_on, weights_changed
from forebay.scheduler.handoff import ASLEEP, LOST
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.residency import Residencies
from tests.scheduler.rig import Rig, config

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
        news = self.scheduler.take_news()
        self.updates += news
        self.take_orders()
        return news

    def take_orders(self):
        new = self.scheduler.handoff.take_orders()
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


# -- prefill -----------------------------------------------------------------------------------------------------------


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
    assert half.scheduler.held.deferred == []
    assert not any(isinstance(order, Withdraw) for order in half.orders)


def test_an_offer_begins_where_decode_has_nothing_and_may_come_before_its_request():
    half = prefill()
    tokens = list(range(12))
    half.hear(Offered(Ticket("d", 5, b"n"), 12, digest_of(array("i", tokens)), 8))
    req = half.meet(tokens)
    assert req.status is Status.WAITING
    half.step()
    assert [order.spans["kv"].start for order in half.orders] == [8, 12]


@pytest.mark.parametrize("change", [{"digest": b"other"}, {"num_tokens": 11}, {"start": 12}, {"start": -4}])
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
    half.updates += half.scheduler.take_news()
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
    go_on(half.scheduler, half.now)
    assert [order.asleep for order in half.take_orders() if isinstance(order, Rest)] == [False]
    half.hear(offered(half.meet(3, room=4)))


def test_prefill_ends_who_waits_for_an_offer_that_will_not_come_and_who_comes_later():
    half = prefill()
    first, other = half.meet(3, room=1), half.meet(4, room=2)
    half.hear(msgspec.structs.replace(offered(first), declined=ASLEEP))
    assert (half.failure_of(first), half.failure_of(other)) == ("peer_asleep", None)
    half.hear(msgspec.structs.replace(offered(first, room=3), declined=ASLEEP))
    late = half.meet([*first.tokens], room=3)
    half.updates += half.scheduler.take_news()
    assert half.failure_of(late) == "peer_asleep"
    assert half.orders == []


def test_prefill_keeps_nothing_that_is_said_of_a_half_that_has_ended_and_refuses_its_offer_at_once():
    half = prefill(max_running_requests=1, max_queued_requests=1)
    for num_ended in range(4):  # more than are kept
        gone = half.meet(3, room=1 + num_ended)
        half.abort(gone.id)
        half.updates += half.scheduler.take_news()
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
    half.scheduler.handoff.wakes, half.scheduler.admits = True, False
    req = half.meet(3)
    half.hear(offered(req))
    half.abort(req.id)
    assert [(type(order), order.failure.code) for order in half.take_orders()] == [(Withdraw, "aborted")]


def test_decode_gives_up_a_hit_whose_state_is_the_only_slot_that_could_be_had():
    states = KindConfig(num_slots=2, strategy=StateStrategy.EXTRA_BUFFER, track_interval=4, anchor_interval=1000)
    half = decode(kinds=states, radix_cache=True, page_size=4, max_running_requests=1, extra=0)
    half.add(list(range(20)), 1)
    half.run()
    half.meet([*range(20), 50], room=1)
    half.step()
    [offer] = [order for order in half.orders if isinstance(order, Offer)]
    assert offer.start == 0


def test_a_decode_engine_tells_prefill_of_halves_that_end_before_their_offer():
    half = decode(max_running_requests=1, extra=0)
    runs, aborted, waits = half.meet(3, room=1), half.meet(4, room=2), half.meet(5, room=3)
    half.step()
    half.abort(aborted.id)
    halt = Halt(half.scheduler, Mode.WAIT)
    half.updates += half.scheduler.take_news()
    assert (half.failure_of(waits), half.failure_of(runs)) == ("peer_asleep", None)
    with pytest.raises(Unavailable) as refused:
        half.meet(6, room=4)
    assert (refused.value.code, halt.done) == ("peer_asleep", False)
    half.take_orders()
    declined = [order for order in half.orders if isinstance(order, Decline)]
    assert [(order.ticket.room, order.failure.code) for order in declined] == [
        (2, "aborted"),
        (3, "peer_asleep"),
        (4, "peer_asleep"),
    ]
    assert [order.digest for order in declined[:2]] == [digest_of(req.tokens) for req in (aborted, waits)]


def test_what_wakes_an_engine_may_be_an_offer():
    half = prefill()
    half.scheduler.handoff.wakes = True
    assert Halt(half.scheduler, Mode.WAIT).done
    early, late = half.meet(10, room=1), half.meet(11, room=2)
    half.hear(offered(early))
    assert (half.updates, early.status) == ([], Status.PENDING)
    go_on(half.scheduler, half.now)
    half.hear(offered(late))
    assert [early.status, late.status] == [Status.WAITING, Status.WAITING]
    assert not half.orders


def test_c31_engines_whose_weights_are_of_different_versions_exchange_nothing_and_say_which_they_are():
    half, other = prefill(), decode()
    weights_changed(half.scheduler, 3)
    weights_changed(other.scheduler, 2)
    theirs = other.meet(10)
    other.step()
    (offer,) = other.orders
    assert offer.weight_version == 2
    req = half.meet(10)
    half.hear(msgspec.structs.replace(offered(req), weight_version=offer.weight_version))
    (withdrawn,) = half.orders
    assert withdrawn.failure.code == half.failure_of(req) == "layout_mismatch"
    assert withdrawn.failure.message.endswith("weight_version: prefill has 3, decode 2")
    other.hear(Broken(offer.ticket, withdrawn.failure))
    assert other.failure_of(theirs) == "layout_mismatch"


def test_c31_an_offer_of_other_weights_that_came_first_ends_its_request_on_arrival():
    half = prefill()
    tokens = list(range(12))
    half.hear(Offered(Ticket("d", 5, b"n"), 12, digest_of(array("i", tokens)), 0, weight_version=1))
    req = half.meet(tokens)
    (told,) = half.scheduler.take_news()
    assert (told.request_id, told.failure.code) == (req.id, "layout_mismatch")
    assert half.scheduler.idle
    (withdrawn,) = half.take_orders()
    assert withdrawn.failure == told.failure


# -- decode ------------------------------------------------------------------------------------------------------------


def arrive(half: Half, offer: Offer, token: int = 50, **tail):
    half.hear(Arrived(offer.ticket, Tail(offer.num_tokens, token, **tail)))
    return half.hear(Closed(offer.ticket))


def test_decode_offers_places_waits_until_they_are_closed_and_decodes_in_the_next_step():
    half = decode(radix_cache=False)
    req = half.meet(10)
    assert half.step() is None
    (offer,) = half.orders
    assert (offer.num_tokens, offer.digest, offer.start, len(offer.spans["kv"].ids)) == (
        10,
        digest_of(req.tokens),
        0,
        3,
    )
    assert offer.ticket == Ticket("d", 5, b"n5")
    assert half.hear(Arrived(offer.ticket, Tail(10, 50))) == []
    assert half.step() is None
    report = CacheReport(cached_tokens=4)
    half.hear(Arrived(offer.ticket, Tail(10, 60, report)))  # once more, and otherwise: the first one counts
    (told,) = half.hear(Closed(offer.ticket))
    assert (told.token_ids, told.cache) == ([50], CacheReport())
    plan = half.step()
    (admission,) = plan.admissions
    assert (admission.prebuilt, admission.kv_len, admission.token_ids[-1]) == (True, 10, 50)
    assert plan.rows.tolist() == [admission.row]
    assert plan.writes.write_pages.tolist() == offer.spans["kv"].ids.tolist()
    half.run()
    assert half.tokens_of(req) == [50, 1000, 1000, 1000]


def test_the_tail_brings_what_was_asked_for_and_may_be_all():
    half = decode()
    req = half.meet(3, max_new=1, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    half.step()
    (told,) = arrive(half, half.orders[0], prompt_logprobs=[None, None, None], cache=CacheReport(cached_tokens=2))
    assert (told.finish, told.cache.cached_tokens, len(told.prompt_logprobs)) == (FinishReason.LENGTH, 2, 3)
    assert half.scheduler.idle
    assert not half.quarantined()
    assert req.num_output == 1


def test_no_more_run_than_may_and_the_other_rows_let_kv_arrive():
    half = decode(max_running_requests=1, extra=2)
    reqs = [half.meet(3, room=room) for room in range(4)]
    half.step()
    assert [order.ticket.room for order in half.orders] == [0, 1, 2]
    for offer in list(half.orders):
        arrive(half, offer)
    half.step()
    assert [req.status for req in reqs] == [Status.DECODING, *[Status.TRANSFERRING] * 2, Status.PENDING]
    for _ in range(3):
        half.step()
        assert len(half.scheduler.running) <= 1
    assert len(half.orders) == 4, "the row of the first is offered"


def test_decode_computes_whoever_has_no_other_half_and_refuses_a_room_in_use():
    half = decode()
    req = half.add(5)
    half.meet(3)
    refused("room_in_use", half.meet, 4)
    half.scheduler.handoff.take(Renewed(Ticket("d", 99, b"")), 0.0)
    half.step()
    assert req.status is Status.DECODING


def test_a_lease_ends_unless_it_is_renewed_and_places_stay_with_the_ticket():
    half = decode(radix_cache=False)
    req, other = half.meet(10, room=1), half.meet(3, room=2)
    half.step()
    one, two = half.orders
    half.now = 20.0
    half.hear(Renewed(two.ticket))
    late(half, 31.0)
    assert half.failure_of(req) == "lease_timeout"
    assert half.failure_of(other) is None
    assert half.orders[-1] == Withdraw(one.ticket, half.updates[-1].failure)
    assert half.quarantined() == {"kv": 3, "rows": 1}
    assert arrive(half, one) == []
    assert half.quarantined() == {}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([Broken], "peer_lost"),
        ([Closed], "transfer_lost"),
        ([Arrived], "transfer_lost"),  # of fewer tokens
    ],
)
def test_a_transfer_that_is_not_whole_ends_its_request(events, code):
    half = decode()
    req = half.meet(10)
    half.step()
    ticket = half.orders[0].ticket
    more = {Broken: (BROKEN,), Arrived: (Tail(9, 50),), Closed: ()}
    for event in events:
        half.hear(event(ticket, *more[event]))
    assert half.failure_of(req) == code
    assert half.hear(Closed(ticket)) == []
    assert half.free_pages == 64


def test_places_are_offered_only_where_all_can_come_to_their_end():
    half = decode(num_pages=8, reserved=4, radix_cache=False)
    first, second = half.meet(12, room=1, max_new=9), half.meet(8, room=2, max_new=9)
    half.step()
    assert [first.status, second.status] == [Status.TRANSFERRING, Status.TRANSFERRING]
    third = half.meet(5, room=3, max_new=9)
    half.step()
    assert third.status is Status.PENDING
    half.abort(first.id)
    half.step()
    assert third.status is Status.PENDING, "what the first was offered may still be written"
    half.hear(Closed(half.orders[0].ticket))
    half.step()
    assert third.status is Status.TRANSFERRING


def test_places_are_offered_only_where_there_is_room_for_what_all_will_soon_need():
    half = decode(num_pages=8, reserved=8, radix_cache=False)
    reqs = [half.meet(4, room=room, max_new=13) for room in range(3)]
    half.step()
    assert [req.status for req in reqs] == [Status.TRANSFERRING, Status.TRANSFERRING, Status.PENDING]


def test_c26_places_from_which_a_step_has_yet_to_save_are_not_offered():
    kinds = KindConfig(slot_bytes={"kv": 10}, retraction_host_bytes=1 << 20, recompute_bytes_per_token=100)
    half = decode(overlap_depth=1, radix_cache=False, kinds=kinds)
    saved = half.add(6, max_new=8)
    half.step()
    half.scheduler.retract(saved)
    half.launch()
    assert half.plans[-1].host.saves, "and loads in the same step"
    half.meet(10)
    half.launch()
    assert not half.take_orders(), "a peer would write there at once"
    half.commit()
    half.launch()
    assert half.take_orders()


def test_c18_c26_of_a_window_that_arrived_in_part_no_more_is_there_after_a_stay_on_the_host():
    kinds = KindConfig(
        slot_bytes={"kv": 10, "window": 10},
        retraction_host_bytes=1 << 20,
        recompute_bytes_per_token=100,
        num_window_pages=60,
        window=6,
    )
    half = decode(kinds=kinds)
    req = half.meet(11, max_new=8)
    half.step()
    arrive(half, half.orders[0])
    (windows,) = half.scheduler.held.kinds

    def begins():
        row = req.residency.row
        return windows.begins[half.scheduler.held.rows.req_to_token[row, windows.start[row]]]

    half.step()
    assert begins() == 2
    half.scheduler.retract(req)
    half.step()
    assert half.plans[-1].host.loads
    assert begins() >= 2


def test_who_is_alone_gives_way_to_those_who_have_arrived():
    half = decode(num_pages=8, max_running_requests=1, radix_cache=False)
    first, second = half.meet(8, room=1, max_new=2), half.meet(8, room=2, max_new=2)
    half.step()
    offers = list(half.orders)
    whole = half.add(8, max_new=16)  # six pages, in the end, of which four are there
    half.step()
    for offer in offers:
        arrive(half, offer)
    half.run()
    assert [len(half.tokens_of(req)) for req in (first, second, whole)] == [2, 2, 16]


def test_a_failing_step_leaves_arrivals_alone():
    half = decode()
    running, coming = half.meet(6, room=1), half.meet(5, room=2)
    half.step()
    arrive(half, half.orders[0])
    half.launch()
    half.updates += half.fail(EngineError("step"))
    assert half.failure_of(running) == "engine_error"
    assert coming.status is Status.TRANSFERRING
    half.scheduler.audit()
    arrive(half, half.orders[1])
    half.run()
    assert half.tokens_of(coming) == [50, 1000, 1000, 1000]


def test_with_wrong_books_what_is_offered_stays_out_of_use_and_is_computed_here(monkeypatch):
    half = decode(radix_cache=False)
    other = half.add(3, max_new=8)
    half.step()
    coming = half.meet(10, room=1)
    half.step()
    (offer,) = half.orders
    half.launch()
    with monkeypatch.context() as patch:
        patch.setattr(Residencies, "start_over", lambda self, *args: 1 / 0)
        half.updates += half.fail(EngineError("step"))
    assert half.failure_of(other) == "engine_error"
    assert half.take_orders() == [Withdraw(offer.ticket, LOST)]
    assert coming.status is Status.WAITING
    assert half.quarantined() == {"kv": 3}
    plan = half.step()
    assert not set(plan.writes.write_pages.tolist()) & set(offer.spans["kv"].ids.tolist())
    assert arrive(half, offer) == []
    half.run()
    assert half.tokens_of(coming) == [1000] * 4
    assert half.free_pages == 64


def test_c4_slots_are_certain_before_memory_is_divided():
    options = DisaggregationOptions(mode=DisaggregationMode.DECODE, decode_extra_slots=2)
    few = KindConfig(num_slots=9)
    with pytest.raises(AssertionError, match="10 state slots"):
        Residencies(config(disaggregation=options, kinds=few, radix_cache=False))


def test_what_a_check_has_is_out_of_use_until_its_ticket_is_closed() -> None:
    half = decode()
    role, held, ticket = half.scheduler.handoff, half.scheduler.held, Ticket("d", 0, b"n")
    before = {pool.name: pool.free for pool in half.scheduler.state(0.0).pools}
    spans = role.set_aside(ticket, 10)
    half.scheduler.audit()
    assert half.quarantined() == {"kv": 3, "rows": 1}
    assert len(spans["kv"].ids) == 3
    left = role.left()
    assert left is not None
    assert sorted(left.ids["kv"]) == sorted(spans["kv"].ids)
    half.hear(Closed(ticket))
    assert {pool.name: pool.free for pool in half.scheduler.state(0.0).pools} == before
    assert (held.deferred, role.num_open) == ([], 0)


@pytest.mark.parametrize("num_tokens", [0, 65, 1 << 40])
def test_a_check_of_more_than_there_is_takes_nothing(num_tokens: int) -> None:
    half = prefill()
    with pytest.raises(Unavailable, match="at most 64"):
        half.scheduler.handoff.set_aside(Ticket("d", 0, b"n"), num_tokens)
    half.scheduler.audit()
    assert half.scheduler.held.deferred == []

"""Decode, alone: what it refuses, orders, waits for and keeps out of use (C2, C4, C8, C18, C21, C22, C26, C27, C31)."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from forebay.base.errors import EngineError, Unavailable
from forebay.config.engine_config import DisaggregationMode, DisaggregationOptions, StateStrategy
from forebay.memory.kinds.window.demand import window_pages_per_request
from forebay.requests.request import Status
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Decline,
    Offer,
    Renewed,
    Tail,
    Ticket,
    Withdraw,
    digest_of,
)
from forebay.requests.updates import CacheReport, FinishReason
from forebay.scheduler.halt import Halt, Mode, weights_changed
from forebay.scheduler.handoff import LOST
from forebay.scheduler.memory.engine_memory import EngineMemory
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.tickets import _All
from tests.kinds_of import kind_config
from tests.scheduler.rig import config
from tests.scheduler.roles import BROKEN, arrive, decode, late, offered, prefill, refused


def test_decode_gives_up_a_hit_whose_state_is_the_only_slot_that_could_be_had():
    states = kind_config(num_slots=2, strategy=StateStrategy.EXTRA_BUFFER, track_interval=4, anchor_interval=1000)
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
    half.updates += half.scheduler.take_updates()
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
        assert len(half.scheduler.queues.running) <= 1
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


def test_c22_places_of_an_ended_transfer_count_until_its_ticket_is_closed():
    half = decode(num_pages=8, radix_cache=False)
    first = half.meet(12, room=1, max_new=1)
    half.step()
    half.abort(first.id)
    long = half.meet(4, room=2, max_new=25)  # seven pages, in the end
    half.step()
    assert long.status is Status.PENDING
    half.hear(Closed(half.orders[0].ticket))
    half.step()
    assert long.status is Status.TRANSFERRING


def test_c26_decode_offers_nothing_before_a_retracted_request_runs_again():
    half = decode()
    was_here = half.add(6, max_new=8)
    half.step()
    half.scheduler.preemption.retract(was_here)
    half.meet(3)
    half.scheduler.handoff.before_plan(half.now)
    assert not half.take_orders()
    half.step()
    half.scheduler.handoff.before_plan(half.now)
    assert half.take_orders()


def test_c27_decode_offers_nothing_while_requests_are_on_trial():
    half = decode()
    suspect = half.add(6, max_new=8)
    half.step()
    half.meet(3)
    half.scheduler.queues.suspects.add_group([(suspect, 0)])
    half.scheduler.handoff.before_plan(half.now)
    assert not half.take_orders()
    half.scheduler.queues.suspects.clear(suspect)
    half.scheduler.handoff.before_plan(half.now)
    assert half.take_orders()


def test_c26_places_from_which_a_step_has_yet_to_save_are_not_offered():
    kinds = kind_config(slot_bytes={"kv": 10}, retraction_host_bytes=1 << 20, recompute_bytes_per_token=100)
    half = decode(overlap_depth=1, radix_cache=False, kinds=kinds)
    saved = half.add(6, max_new=8)
    half.step()
    half.scheduler.preemption.retract(saved)
    half.launch()
    assert half.plans[-1].host.saves, "and loads in the same step"
    half.meet(10)
    half.launch()
    assert not half.take_orders(), "a peer would write there at once"
    half.commit()
    half.launch()
    assert half.take_orders()


def test_c18_c26_of_a_window_that_arrived_in_part_no_more_is_there_after_a_stay_on_the_host():
    kinds = kind_config(
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
    (windows,) = half.scheduler.pools.kinds

    def begins():
        row = req.allocation.row
        return windows.map.begins[half.scheduler.pools.rows.req_to_token[row, windows.start[row]]]

    half.step()
    assert begins() == 2
    half.scheduler.preemption.retract(req)
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
        patch.setattr(EngineMemory, "start_over", lambda self, *args: 1 / 0)
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


def test_c22_with_wrong_books_the_row_of_an_offered_ring_is_nobody_s_until_its_ticket_is_closed(monkeypatch):
    rings = replace(kind_config(), num_slots={"ring": 2}, slot_bytes={"kv": 100, "ring": 10})
    half = decode(kinds=rings, max_running_requests=2, extra=0, radix_cache=False)
    half.add(3, max_new=8)
    half.step()
    half.meet(10, room=1)
    half.step()
    (offer,) = half.orders
    (row,) = offer.spans["ring"].ids.tolist()
    half.launch()
    with monkeypatch.context() as patch:
        patch.setattr(EngineMemory, "start_over", lambda self, *args: 1 / 0)
        half.updates += half.fail(EngineError("step"))
    rows = half.scheduler.pools.rows.slots
    assert rows.num_free == 1
    half.add(5, max_new=2)
    assert row not in half.step().rows.tolist()
    half.run()
    half.scheduler.audit()
    assert rows.num_free == 1
    half.hear(Closed(offer.ticket))
    half.run()
    half.scheduler.audit()
    assert rows.num_free == 2


def test_c18_windows_of_a_hit_that_a_prompt_from_elsewhere_has_left_behind_may_be_evicted():
    """The request's own window begins behind the hit: it reads none of the hit's windows."""
    half = decode(kinds=kind_config(num_window_pages=40, window=6), radix_cache=True, page_size=4)
    half.add(list(range(20)), 1)
    half.run()
    (windows,) = half.scheduler.pools.kinds
    assert windows.num_cached == windows.in_tree.num_evictable > 0
    req = half.meet([*range(20), *range(50, 90)])
    half.step()
    offer = half.orders[-1]
    assert offer.start == 20, "the prompt has a hit"
    assert req.allocation.pin.num_pages == 5
    assert windows.in_tree.num_evictable == windows.num_cached
    arrive(half, offer)
    half.run()
    assert windows.num_locked == 0


def test_c22_windows_left_to_a_ticket_are_promised_to_no_row_until_it_is_closed(monkeypatch):
    """With the fewest windows that two rows need: a chunk of the second row once found none."""
    windows = kind_config(num_window_pages=2 * window_pages_per_request(6, 1, 0) + 4, window=6)
    own = {"page_size": 1, "chunked_prefill_size": 4, "max_running_requests": 2, "extra": 0, "radix_cache": False}
    half = decode(kinds=windows, **own)
    half.add(3, max_new=8)
    half.step()
    half.meet(10, room=1)
    half.step()
    (offer,) = half.orders
    assert len(offer.spans["window"].ids) == 5
    half.launch()
    with monkeypatch.context() as patch:
        patch.setattr(EngineMemory, "start_over", lambda self, *args: 1 / 0)
        half.updates += half.fail(EngineError("step"))
    reqs = [half.add(12, max_new=12), half.add(12, max_new=12)]
    for _ in range(12):
        assert half.step()
        assert half.scheduler.queues.num_running <= 1
    assert half.scheduler.pools.rows.slots.num_free == 1
    half.hear(Closed(offer.ticket))
    half.step()
    assert half.scheduler.queues.num_running == 2
    half.run()
    assert [len(half.tokens_of(req)) for req in reqs] == [12, 12]


def test_c27_request_whose_transfer_was_cleared_has_no_lease(monkeypatch):
    half = decode(radix_cache=False)
    half.add(3, max_new=8)
    half.step()
    coming = half.meet(10, room=1)
    half.step()
    half.launch()
    with monkeypatch.context() as patch:
        patch.setattr(EngineMemory, "start_over", lambda self, *args: 1 / 0)
        half.updates += half.fail(EngineError("step"))
    late(half, 31.0)
    assert half.failure_of(coming) is None
    assert coming.status is Status.WAITING


def test_c27_transfer_that_has_arrived_has_no_lease():
    half = decode()
    req = half.meet(10)
    half.step()
    half.hear(Arrived(half.orders[0].ticket, Tail(10, 50)))
    late(half, 31.0)
    assert half.failure_of(req) is None
    half.hear(Closed(half.orders[0].ticket))
    half.run()
    assert half.tokens_of(req) == [50, 1000, 1000, 1000]


def test_c32_prompt_that_arrived_and_is_computed_again_is_charged_once():
    half = decode(radix_cache=False)
    req = half.meet(10)
    half.step()
    arrive(half, half.orders[0])
    half.step()
    half.scheduler.preemption.retract(req)
    half.run()
    assert req.account.service == 14


def test_c4_request_without_a_free_state_is_offered_no_places():
    """A state that has leaked is out of use, and its row is not."""
    half = decode(kinds=kind_config(num_slots=2), radix_cache=False, max_running_requests=2, extra=0)
    (states,) = half.scheduler.pools.kinds
    states.slots.take_ids(1, 99)
    first, second = half.meet(10, room=1), half.meet(10, room=2)
    half.step()
    assert (first.status, second.status) == (Status.TRANSFERRING, Status.PENDING)


def test_c4_slots_are_certain_before_memory_is_divided():
    options = DisaggregationOptions(mode=DisaggregationMode.DECODE, decode_extra_slots=2)
    few = kind_config(num_slots=9)
    with pytest.raises(AssertionError, match="10 state slots"):
        Pools(config(disaggregation=options, kinds=few, radix_cache=False))


def test_c22_places_left_at_a_clear_wait_for_the_last_of_their_tickets() -> None:
    half = decode()
    role, tickets = half.scheduler.handoff, [Ticket("d", 0, b"n"), Ticket("d", 1, b"o")]
    for ticket in tickets:
        role.spare.set_aside(ticket, 10)
    left = role.tickets.slots_in_transfer()
    assert left is not None
    for ticket in tickets:
        assert not left.ticket.is_open
        half.hear(Closed(ticket))
    assert left.ticket.is_open


def test_what_a_check_has_is_out_of_use_until_its_ticket_is_closed() -> None:
    half = decode()
    role, pools, ticket = half.scheduler.handoff, half.scheduler.pools, Ticket("d", 0, b"n")
    before = {pool.name: pool.free for pool in half.scheduler.state(0.0).pools}
    spans = role.spare.set_aside(ticket, 10)
    half.scheduler.audit()
    assert half.quarantined() == {"kv": 3, "rows": 1}
    assert len(spans["kv"].ids) == 3
    left = role.tickets.slots_in_transfer()
    assert left is not None
    assert sorted(left.ids["kv"]) == sorted(spans["kv"].ids)
    half.hear(Closed(ticket))
    assert {pool.name: pool.free for pool in half.scheduler.state(0.0).pools} == before
    assert (pools.deferred.entries, role.tickets.num_open) == ([], 0)


def test_decode_keeps_nothing_of_a_request_that_has_ended():
    half = decode()
    req = half.meet(3)
    half.step()
    arrive(half, half.orders[0])
    half.run()
    assert req.status is Status.FINISHED
    assert half.scheduler.handoff.arrivals.fresh == set()


def test_decode_charges_who_is_offered_places_and_lets_go_of_its_closed_ticket():
    half = decode()
    req = half.meet(3)
    half.now += 2.0
    half.step()
    assert (req.account.num_started, req.account.queued_s) == (1, 2.0)
    arrive(half, half.orders[0])
    assert req.allocation.ticket is None


@pytest.mark.parametrize("name", ["is_open", "ended"])
@pytest.mark.parametrize("values", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_c22_tickets_together_are_closed_and_ended_once_each_is(name: str, values: tuple[bool, bool]) -> None:
    together = _All([SimpleNamespace(**{name: value}) for value in values])  # type: ignore[misc]
    assert getattr(together, name) is all(values)

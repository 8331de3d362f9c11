"""Who waits for whom, and for how long at most (C26, C27)."""

import pytest

from forebay.config.engine_config import Ledger, SchedulePolicy
from forebay.requests.request import Request, Status
from forebay.requests.updates import FinishReason
from tests.scheduler.rig import Rig

# -- times ------------------------------------------------------------------------------------------------------------


def retracted(**limits: float) -> tuple[Rig, Request]:
    """Two requests of which only one can finish at a time, and the one that gave way; at time 0."""
    rig = Rig(page_size=1, num_pages=16, schedule_conservativeness=0.01, **limits)
    rig.add(4, max_new=9)
    second = rig.add(4, max_new=9)
    while not second.num_retractions:
        rig.step()
    assert second.status is Status.WAITING
    return rig, second


def test_a_retracted_request_is_not_queued_anew():
    """It had its turn in the queue: the time-out of those who never started is not its."""
    rig, second = retracted(queue_timeout_s=5.0)
    assert rig.expire(10.0) == []
    rig.run()
    assert rig.finish_of(second) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"stall_timeout_s": 5.0}, "no token for 10.0 s; the limit is 5 s"),
        ({"request_timeout_s": 5.0}, "took 10.0 s; the limit is 5 s"),
    ],
)
def test_a_retracted_request_that_does_not_come_back_in_time_ends_typed(limits, message):
    rig, second = retracted(**limits)
    assert rig.expire(4.0) == []
    (update,) = [update for update in rig.expire(10.0) if update.request_id == second.id]
    assert (update.finish, update.failure.kind) == (FinishReason.ERROR, "RequestTimeout")
    assert message in update.failure.message


def test_the_time_in_the_queue_is_no_time_without_a_token():
    rig = Rig(stall_timeout_s=5.0, queue_timeout_s=60.0)
    rig.add(3)
    assert rig.expire(50.0) == []
    rig.now = 50.0
    rig.launch()
    assert rig.expire(54.0) == []
    assert len(rig.expire(56.0)) == 1


def test_each_chunk_and_each_token_is_progress():
    rig = Rig(stall_timeout_s=5.0, chunked_prefill_size=4)
    req = rig.add(24, max_new=4)
    while not rig.scheduler.idle:
        rig.now += 4.0
        rig.step()
        assert rig.expire(rig.now) == []
    assert rig.finish_of(req) is FinishReason.LENGTH


# -- overtaking -------------------------------------------------------------------------------------------------------


def started(rig: Rig) -> list[int]:
    return [admission.request_id for plan in rig.plans for admission in plan.admissions]


def test_a_request_that_does_not_fit_is_overtaken_exactly_64_times():
    rig = Rig(
        page_size=1,
        num_pages=160,
        context_length=400,
        schedule_conservativeness=1.0,
        max_queued_requests=400,
        radix_cache=False,
    )
    rig.add(4, max_new=150)
    rig.step()
    big = rig.add(100, max_new=8)
    for _ in range(70):
        rig.add(2, max_new=1)
        rig.step()
    assert big.status is Status.WAITING
    assert started(rig) == [1, *range(3, 67)]
    rig.run()
    assert rig.finish_of(big) is FinishReason.LENGTH
    assert started(rig)[65] == big.id


def test_lpm_passes_a_request_without_a_hit_over_exactly_64_times():
    """It would fit at any time: what it is overtaken by are hits, one after the other."""
    rig = Rig(max_running_requests=1, schedule_policy=SchedulePolicy.LPM)
    rig.add(list(range(20)), max_new=1)
    rig.run()
    stranger = rig.add([90, 91], max_new=1)
    for token in range(80):
        rig.add([*range(16), 100 + token], max_new=1)
        rig.add([*range(16), 200 + token], max_new=1)
        if rig.finish_of(stranger):
            break
        for _ in range(2):
            rig.step()
    assert started(rig).index(stranger.id) == 1 + 64


def test_lpm_tries_those_that_were_passed_over_in_the_order_of_their_rank():
    rig = Rig(max_running_requests=1, schedule_policy=SchedulePolicy.LPM)
    rig.add(list(range(20)), max_new=1)
    rig.run()
    reqs = [rig.add(prompt, max_new=1) for prompt in ([90, 91], [*range(16), 92], [*range(16), 93])]
    reqs[0].overtaken = reqs[1].overtaken = 64
    rig.run()
    assert started(rig) == [1, 2, 3, 4]


def test_a_request_is_not_overtaken_by_those_before_it():
    rig = Rig(max_running_requests=2)
    for _ in range(6):
        rig.add(3, max_new=2)
    rig.run()
    assert [req.overtaken for req in rig.reqs.values()] == [0] * 6


# -- giving way -------------------------------------------------------------------------------------------------------


def test_the_last_in_rank_gives_way_also_when_its_prompt_is_under_way():
    rig = Rig(page_size=1, num_pages=20, chunked_prefill_size=2, schedule_conservativeness=0.01, radix_cache=False)
    first = rig.add(4, max_new=16)
    while first.status is not Status.DECODING:
        rig.step()
    second = rig.add(12, max_new=2)
    while not second.num_retractions and not rig.scheduler.idle:
        assert second.status is not Status.DECODING
        rig.step()
    assert (first.num_retractions, second.num_retractions) == (0, 1)
    rig.run()
    assert [len(rig.tokens_of(req)) for req in (first, second)] == [16, 2]


def test_the_only_one_gives_way_to_nobody():
    """Pages were lost while it ran: it is told so, and is not sent back in vain."""
    rig = Rig(page_size=1, num_pages=8, radix_cache=False, ledger=Ledger.COUNT)
    req = rig.add(4, max_new=5)
    rig.step()
    kv = rig.scheduler.pools.kv
    kv.quarantine(kv.take_ids(3, 99), 99, "lost")
    for _ in range(5):
        rig.step()
    assert (req.status, req.num_retractions) == (Status.FINISHED, 0)
    assert [update.failure.code for update in rig.updates if update.failure] == ["memory_lost"]


def test_nobody_gives_way_for_pages_that_are_on_their_way_back():
    """One has ended, and a step in flight may still write to its pages: the others sit a step out."""

    def sample(row: int) -> int:
        ending = rig.reqs[1]
        return 7 if ending.maybe_allocation and row == ending.allocation.row and ending.num_output == 1 else 1000

    rig = Rig(sample, depth=1, page_size=1, num_pages=12, schedule_conservativeness=0.01, radix_cache=False)
    for _ in range(3):
        rig.add(2, max_new=4)
    rig.run()
    assert rig.finish_of(rig.reqs[1]) is FinishReason.STOP
    assert [req.num_retractions for req in rig.reqs.values()] == [0, 0, 0]
    assert [plan.num_seqs for plan in rig.plans] == [3, 3, 3, 2]


@pytest.mark.parametrize("num_retractions", [0, 1])
def test_a_retracted_request_comes_back_only_with_room_for_all_that_it_may_generate(num_retractions):
    rig = Rig(page_size=1, num_pages=32, schedule_conservativeness=0.01)
    rig.add(4, max_new=8)
    rig.step()
    back = rig.add(4, max_new=26)
    back.num_retractions = num_retractions
    rig.step()
    assert (back.status is Status.WAITING) == bool(num_retractions)
    rig.run()
    assert rig.finish_of(back) is FinishReason.LENGTH


@pytest.mark.parametrize(("num_pages", "starts"), [(28, True), (25, False)])
def test_nobody_starts_without_room_for_what_the_others_will_need(num_pages, starts):
    rig = Rig(page_size=1, num_pages=num_pages, schedule_conservativeness=1.0)
    rig.add(4, max_new=20)
    rig.step()
    second = rig.add(4, max_new=10)
    rig.step()
    assert (second.status is not Status.WAITING) == starts
    rig.run()


def test_the_token_that_arrives_after_a_retraction_is_counted_among_the_waiting_ones():
    rig = Rig(page_size=1, num_pages=16, schedule_conservativeness=0.01, depth=1)
    rig.add(4, max_new=9)
    second = rig.add(4, max_new=9)
    while not rig.scheduler.idle:
        rig.step()
        waiting = [req for req in rig.reqs.values() if req.status is Status.WAITING]
        assert rig.scheduler.state(rig.now).num_waiting_tokens == sum(len(req.tokens) for req in waiting)
    assert second.num_retractions == 1


# -- waiting for a prompt under way -----------------------------------------------------------------------------------


def test_a_prompt_waits_for_the_same_one_of_its_own_tenant_alone():
    rig = Rig(chunked_prefill_size=128, context_length=128)
    reqs = [rig.add(list(range(60)), max_new=2, namespace=namespace) for namespace in ("a", "a", "b")]
    rig.step()
    assert started(rig) == [1, 3]
    rig.run()
    assert [req.cache_report.cached_tokens for req in reqs] == [0, 56, 0]


def test_a_prompt_waits_for_no_longer_than_the_one_before_it_is_under_way():
    rig = Rig(chunked_prefill_size=128, context_length=128)
    first, second = (rig.add(list(range(60)), max_new=2) for _ in range(2))
    rig.step()
    rig.abort(first.id)
    rig.scheduler.flush_cache()
    rig.step()
    assert started(rig) == [1, 2]
    rig.run()
    assert rig.finish_of(second) is FinishReason.LENGTH

"""Tenants share an engine by their weights, and none waits for another's backlog (C32)."""

from collections import Counter

import pytest

from forebay.base.errors import InvalidRequest, Overloaded
from forebay.base.room import Room
from forebay.config.engine_config import SchedulePolicy
from forebay.requests.account import PATIENCE
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.updates import FinishReason
from forebay.scheduler import queues
from forebay.scheduler.admission import MAX_OVERTAKES
from forebay.scheduler.queues import Line
from forebay.scheduler.state import SchedulerState
from tests.scheduler.rig import Rig

EVEN = {"a": 1, "b": 1}


def shared(weights: dict[str, int] | None = None, **changes) -> Rig:
    asked = {"tenants": weights or EVEN, "max_queued_requests": 400, "num_pages": 512, "context_length": 400}
    return Rig(**{**asked, "radix_cache": False, **changes})


def started(rig: Rig) -> list[str]:
    """The tenants of the requests that started, in order."""
    return [rig.reqs[admission.request_id].tenant for plan in rig.plans for admission in plan.admissions]


def flood(rig: Rig, tenant: str, num: int, num_tokens: int = 4, max_new: int = 4) -> list[Request]:
    return [rig.add(num_tokens, max_new=max_new, tenant=tenant) for _ in range(num)]


def rows_of(rig: Rig, tenant: str) -> int:
    running = [*rig.scheduler.queues.running.reqs, *rig.scheduler.queues.extending]
    return sum(req.tenant == tenant for req in running)


# -- turns ------------------------------------------------------------------------------------------------------------


def test_c32_newcomer_behind_a_flood_starts_with_the_next_free_row():
    rig = shared(max_running_requests=4)
    flood(rig, "a", 40)
    rig.step()
    one = rig.add(4, tenant="b")
    while one.status is Status.WAITING:
        assert started(rig) == ["a"] * 4
        rig.step()
    assert started(rig).index("b") == 4
    rig.run()


def test_c32_two_backlogged_tenants_are_served_by_their_weights():
    rig = shared({"a": 3, "b": 1}, max_running_requests=4)
    flood(rig, "a", 120)
    flood(rig, "b", 120)
    for _ in range(100):
        rig.step()
    served = {name: rig.scheduler.queues.accounts[name].computed_tokens for name in "ab"}
    generated = {name: rig.scheduler.queues.accounts[name].generated_tokens for name in "ab"}
    for tokens in (served, generated):
        assert tokens["a"] == pytest.approx(3 * tokens["b"], rel=0.1)
    rig.run(2000)


def test_c32_tenant_with_longer_outputs_starts_fewer_requests():
    """What is shared is tokens, and not requests."""
    rig = shared(max_running_requests=4)
    flood(rig, "a", 100, max_new=2)
    flood(rig, "b", 100, max_new=20)
    for _ in range(150):
        rig.step()
    a, b = (rig.scheduler.queues.accounts[name] for name in "ab")
    assert abs(a.service - b.service) < 4 * 24
    assert a.num_started > 2 * b.num_started
    rig.run(4000)


def test_c32_tenant_that_was_idle_has_no_credit():
    rig = shared(max_running_requests=1)
    flood(rig, "a", 60)
    while rig.scheduler.queues.accounts["a"].num_started < 30:
        rig.step()
    flood(rig, "b", 20)
    rig.run()
    assert "bb" not in "".join(started(rig)[31:60])


def test_c32_tenant_that_used_idle_capacity_has_no_debt():
    """Nobody waited while `a` ran alone, so `b` is owed nothing for that."""
    rig = shared(max_running_requests=2)
    flood(rig, "a", 2, max_new=60)
    for _ in range(59):
        rig.step()
    flood(rig, "b", 10)
    flood(rig, "a", 10)
    rig.run()
    assert "bbb" not in "".join(started(rig)[2:14])


def test_c32_long_prompt_holds_up_no_chunk_of_another_tenant():
    rig = shared(chunked_prefill_size=4)
    long = rig.add(200, tenant="a")
    rig.step()
    one = rig.add(3, tenant="b")
    for _ in range(2):  # at most one chunk of the other comes first
        rig.step()
    assert (long.status, one.status) == (Status.EXTENDING, Status.DECODING)
    assert rig.plans[-1].q_lens.tolist() == [3, 1]
    rig.run()


def test_c32_two_long_prompts_of_two_tenants_take_turns():
    rig = shared(chunked_prefill_size=4)
    first, second = rig.add(80, tenant="a"), rig.add(80, tenant="b")
    for _ in range(10):
        rig.step()
        assert abs(first.num_charged - second.num_charged) <= 4
    assert first.num_charged == second.num_charged == 20
    rig.run()


def test_c32_priority_puts_a_request_before_others_of_its_own_tenant_alone():
    rig = shared(max_running_requests=1, schedule_policy=SchedulePolicy.PRIORITY)
    running = rig.add(4, tenant="b")
    rig.step()
    rig.add(4, tenant="b")
    late = [rig.add(4, tenant="a", priority=9) for _ in range(3)]
    while rig.finish_of(running) is None:
        rig.step()
    rig.run()
    assert started(rig) == ["b", "a", "b", "a", "a"]
    assert all(map(rig.finish_of, late))


def test_c32_prompt_waits_for_one_under_way_of_its_own_tenant_alone():
    rig = shared(radix_cache=True, chunked_prefill_size=64)
    prompt = list(range(100, 160))
    for tenant in "aab":
        rig.add(prompt, tenant=tenant)
    rig.step()
    assert started(rig) == ["a", "b"]
    rig.run()


# -- what is charged --------------------------------------------------------------------------------------------------


def test_c32_cached_tokens_are_not_charged():
    rig = shared(radix_cache=True)
    prompt = list(range(100, 141))
    for tenant, cost in (("a", 41 + 2), ("b", 1 + 2)):
        before = rig.scheduler.queues.accounts[tenant].service
        rig.scheduler.queues.join(rig.scheduler.queues.accounts[tenant], rig.scheduler.queues.waiting)
        begun = rig.scheduler.queues.accounts[tenant].service
        rig.add(prompt, max_new=2, tenant=tenant)
        rig.run()
        assert rig.scheduler.queues.accounts[tenant].service - begun == cost, before


def test_c32_tokens_computed_again_are_not_charged_again():
    rig = shared(page_size=1, num_pages=16, context_length=64, schedule_conservativeness=0.01)
    reqs = [rig.add(4, max_new=9, tenant=tenant) for tenant in "ab"]
    rig.run()
    assert sum(req.num_retractions for req in reqs)
    assert sum(req.num_recomputed for req in reqs)
    for tenant in "ab":
        account = rig.scheduler.queues.accounts[tenant]
        assert (account.computed_tokens, account.generated_tokens) == (4, 9)


def test_c32_step_is_charged_in_equal_parts_to_those_that_get_something_from_it():
    """And not to the first chunk of a prompt, which fills its step."""
    rig = shared({"a": 2, "b": 1}, chunked_prefill_size=8)
    rig.scheduler.queues.step_cost = 6.0
    flood(rig, "a", 2, max_new=8)
    rig.step()
    rig.add(12, tenant="b")
    parts = []
    for _ in range(3):
        before = {name: rig.scheduler.queues.accounts[name].step_tokens for name in "ab"}
        rig.step()
        parts.append([rig.scheduler.queues.accounts[name].step_tokens - before[name] for name in "ab"])
    assert parts == [[6.0, 0.0], [4.0, 2.0], [4.0, 2.0]]
    account = rig.scheduler.queues.accounts["a"]
    assert 2 * account.service == account.step_tokens + account.computed_tokens + account.generated_tokens


def test_c32_pooled_prompts_are_charged_for_their_steps():
    rig = shared()
    rig.scheduler.queues.step_cost = 6.0
    for tenant in "aab":
        rig.add(4, tenant=tenant, params=SamplingParams.of_pooling(Pooling(PoolingKind.LAST)))
    rig.launch()
    rig.commit(vectors=dict.fromkeys(range(3), b"0000"))
    assert [rig.scheduler.queues.accounts[name].step_tokens for name in "ab"] == [4.0, 2.0]


# -- places -----------------------------------------------------------------------------------------------------------


def steps_until_start(rig: Rig, req: Request, limit: int = 400) -> int:
    for used in range(limit):
        if req.status is not Status.WAITING:
            return used
        rig.step()
    raise AssertionError(f"{req} has not started after {limit} steps")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_c32_newcomer_under_long_outputs_starts_within_the_stated_bound(depth):
    """Every row is that of a request that has hundreds of tokens to go."""
    rig = shared(max_running_requests=4, depth=depth, overlap_depth=depth)
    long = flood(rig, "a", 4, max_new=300)
    flood(rig, "a", 4, max_new=300)
    for _ in range(10):
        rig.step()
    one = rig.add(4, tenant="b")
    assert steps_until_start(rig, one) <= PATIENCE + depth + 3
    assert [req.status for req in long] == [Status.DECODING] * 3 + [Status.WAITING]
    assert rig.scheduler.counters["displaced"] == 1
    assert [req.num_retractions for req in long] == [0] * 4
    rig.run(3000)
    assert all(rig.finish_of(req) is FinishReason.LENGTH for req in rig.reqs.values())


def displaced(rig: Rig) -> Request:
    """The request that gives its place to one of another tenant, in steps that are longer than the patience."""
    before = [*rig.scheduler.queues.running.reqs, *rig.scheduler.queues.extending]
    for _ in range(20):
        rig.now += 1.0
        rig.step()
        if rig.scheduler.counters["displaced"]:
            (victim,) = [req for req in before if req.status is Status.WAITING]
            return victim
    raise AssertionError("none was displaced")


def test_c32_prompt_under_way_keeps_its_place_until_it_decodes():
    """Else tenants would compute their newest prompts again and again for each other."""
    rig = shared(max_running_requests=4, chunked_prefill_size=8)
    reqs = flood(rig, "a", 3, max_new=300)
    rig.step()
    long = rig.add(300, max_new=90, tenant="a")
    rig.step()
    rig.add(4, tenant="b")
    assert displaced(rig) is reqs[-1]
    assert long.status is Status.EXTENDING


def test_c32_prompt_of_lower_priority_gives_its_place_before_one_that_decodes():
    rig = shared(max_running_requests=3, chunked_prefill_size=8, schedule_policy=SchedulePolicy.PRIORITY)
    for _ in range(2):
        rig.add(4, max_new=300, tenant="a", priority=1)
    rig.step()
    long = rig.add(300, max_new=90, tenant="a")
    rig.step()
    rig.add(4, tenant="b")
    assert displaced(rig) is long


def test_c32_newcomer_with_a_backlog_gets_its_share_of_the_rows_and_no_more():
    rig = shared({"a": 3, "b": 1}, max_running_requests=8, context_length=1200, num_pages=8000)
    flood(rig, "a", 16, max_new=1000)
    rig.step()
    flood(rig, "b", 16, max_new=1000)
    for _ in range(6 * PATIENCE):
        rig.step()
    assert (rows_of(rig, "a"), rows_of(rig, "b")) == (6, 2)
    assert rig.scheduler.counters["displaced"] == 2


def test_c32_displacement_is_never_answered_by_another():
    rig = shared(max_running_requests=4, context_length=2000, num_pages=4000)
    flood(rig, "a", 8, max_new=1500)
    rig.step()
    flood(rig, "b", 8, max_new=1500)
    for _ in range(12 * PATIENCE):
        rig.step()
    assert (rows_of(rig, "a"), rows_of(rig, "b")) == (2, 2)
    assert rig.scheduler.counters["displaced"] == 2


def test_c32_tenant_with_one_running_request_keeps_it():
    rig = shared({"a": 1, "b": 1, "c": 1}, max_running_requests=2)
    reqs = [rig.add(4, max_new=100, tenant=tenant) for tenant in "abc"]
    assert steps_until_start(rig, reqs[2]) >= 99
    assert rig.scheduler.counters["displaced"] == 0
    rig.run()


def test_c32_request_that_lacks_pages_displaces_one_of_the_tenant_that_has_most():
    rig = shared(page_size=1, num_pages=400, max_running_requests=8, schedule_conservativeness=1.0)
    first, _, last = flood(rig, "a", 3, max_new=180)
    for _ in range(5):
        rig.step()
    one = rig.add(50, max_new=40, tenant="b")
    assert steps_until_start(rig, one) <= PATIENCE + 3
    assert (first.status, last.status) == (Status.DECODING, Status.WAITING)
    rig.run(1000)


def test_c32_request_larger_than_its_tenants_share_displaces_nobody():
    rig = shared(page_size=1, num_pages=400, max_running_requests=8, schedule_conservativeness=1.0)
    flood(rig, "a", 2, max_new=180)
    for _ in range(5):
        rig.step()
    one = rig.add(190, max_new=80, tenant="b")
    steps_until_start(rig, one)
    assert rig.scheduler.counters["displaced"] == 0
    rig.run(1000)


def test_c32_what_is_freed_for_a_newcomer_goes_to_nobody_else():
    """Several must be displaced for it; between them a small request of the other tenant would fit."""
    rig = shared(page_size=1, num_pages=400, max_running_requests=16, schedule_conservativeness=1.0)
    flood(rig, "a", 11, max_new=44)
    rig.step()
    one = rig.add(60, max_new=60, tenant="b")
    rig.scheduler.queues.accounts["b"].waits_since = -PATIENCE
    rig.step()
    flood(rig, "a", 4, num_tokens=2, max_new=2)
    steps_until_start(rig, one)
    assert started(rig)[11] == "b"
    assert rig.scheduler.counters["displaced"] >= 2
    rig.run(1000)


# -- giving way when memory runs out ----------------------------------------------------------------------------------


def test_c32_tenant_with_the_most_pages_for_its_weight_gives_way():
    rig = shared(page_size=1, num_pages=80, context_length=60, schedule_conservativeness=0.01)
    reqs = flood(rig, "a", 4, max_new=30)
    reqs.append(rig.add(4, max_new=30, tenant="b"))
    while not rig.scheduler.counters["retractions"]:
        rig.step()
    assert [req.num_retractions for req in reqs] == [0, 0, 0, 1, 0]
    rig.run(1000)
    assert reqs[4].num_retractions == reqs[0].num_retractions == 0


def test_c26_first_in_rank_of_all_is_never_retracted_whatever_its_tenant_holds():
    rig = shared({"a": 1, "b": 100}, page_size=1, num_pages=30, context_length=29, schedule_conservativeness=0.01)
    first, second = rig.add(12, max_new=15, tenant="a"), rig.add(4, max_new=15, tenant="b")
    rig.run()
    assert (first.num_retractions, bool(second.num_retractions)) == (0, True)


# -- overtaking -------------------------------------------------------------------------------------------------------


def test_c32_request_that_does_not_fit_is_overtaken_by_other_tenants_only_so_often():
    rig = shared(page_size=1, num_pages=160, schedule_conservativeness=1.0)
    rig.add(4, max_new=150, tenant="a")
    rig.step()
    big = rig.add(100, max_new=8, tenant="b")
    for _ in range(MAX_OVERTAKES + 6):
        rig.add(2, max_new=1, tenant="a")
        rig.step()
    assert started(rig) == ["a"] * (1 + MAX_OVERTAKES)
    assert big.overtaken == MAX_OVERTAKES
    rig.run()
    assert started(rig)[1 + MAX_OVERTAKES] == "b"


def test_c32_request_whose_turn_comes_later_is_not_overtaken():
    rig = shared(max_running_requests=1)
    reqs = flood(rig, "a", 6) + flood(rig, "b", 6)
    rig.run()
    assert [req.overtaken for req in reqs] == [0] * 12


# -- the queue --------------------------------------------------------------------------------------------------------


def test_c32_full_queue_refuses_the_tenant_that_fills_it_and_takes_others():
    rig = shared(max_running_requests=2, max_queued_requests=6)
    flood(rig, "a", 8)
    with pytest.raises(Overloaded, match=r"8 requests run or wait; at most 8 are taken"):
        rig.add(4, tenant="a")
    reqs = flood(rig, "b", 4)
    with pytest.raises(Overloaded, match=r"4 requests of this API key run or wait; at most 8 are taken"):
        rig.add(4, tenant="b")
    rig.run()
    assert all(rig.finish_of(req) for req in reqs)
    assert rig.scheduler.queues.room.num_inside == 0


def test_c32_full_token_queue_refuses_the_tenant_that_fills_it_and_takes_others():
    rig = shared(max_running_requests=1, max_queued_tokens=40)
    rig.add(4, tenant="a")
    rig.step()
    flood(rig, "a", 4, num_tokens=10)
    with pytest.raises(Overloaded, match="40 prompt tokens"):
        rig.add(4, tenant="a")
    flood(rig, "b", 1, num_tokens=30)  # the first may be of any length
    with pytest.raises(Overloaded, match="40 prompt tokens"):
        rig.add(4, tenant="b")
    rig.run()


def test_c32_tenant_without_a_weight_is_refused():
    with pytest.raises(InvalidRequest, match="the tenant 'mallory' is not known"):
        shared().add(4, tenant="mallory")


def test_room_share_counts_those_inside_alone():
    room = Room({"a": 3, "b": 1, "c": 4})
    assert room.share("a", 80) == 80
    room.enter("b", 2)
    assert (room.share("a", 80), room.share("b", 80), room.share("c", 2), room.share("a", 0)) == (60, 80, 1, 0)
    room.leave("b", 2)
    assert room.share("a", 80) == 80


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_c32_plan_looks_at_no_more_requests_the_more_wait(monkeypatch):
    rig = shared(max_running_requests=4, max_queued_requests=1 << 20)
    flood(rig, "a", 2000)
    flood(rig, "b", 2000)
    ranked = []
    monkeypatch.setattr(Line, "__iter__", lambda self: pytest.fail("a plan looks at all that wait"))
    monkeypatch.setattr(queues, "by_rank", lambda req: ranked.append(req) or req.rank)
    for _ in range(12):
        rig.scheduler.plan(0.0)
        ranked_now, ranked[:] = len(ranked), []
        assert ranked_now < 40
        plan = rig.scheduler.queues.flights[0].plan
        rig.flights.append(plan)
        rig.commit()


def test_c32_long_steps_end_the_patience_by_time():
    """Steps of whole chunks of prompts take a second: 32 of them are no bound that a client would accept."""
    rig = shared(max_running_requests=4)
    flood(rig, "a", 8, max_new=300)
    rig.step()
    one, num_steps = rig.add(4, tenant="b"), 0
    while one.status is Status.WAITING:
        rig.now += 1.0
        rig.step()
        num_steps += 1
    assert num_steps <= 4
    assert rig.scheduler.counters["displaced"] == 1


@pytest.mark.parametrize("weights", [{}, EVEN])
def test_state_tells_of_tenants_only_if_some_are_configured(weights: dict[str, int]) -> None:
    rig = Rig(tenants=weights)
    rig.add(4, max_new=1, tenant="a" if weights else "")
    told = SchedulerState.of(rig.scheduler.queues, 0.0).tenants
    assert ("a" in {state.name for state in told}) is bool(told) is bool(weights)


def test_c20_start_counts_why_its_cached_tokens_are_not_more() -> None:
    rig = Rig(page_size=4)
    for _ in range(2):
        rig.add(9, max_new=1)
        rig.run()
    reasons = [f"misses.{req.cache_report.miss_reason}" for req in rig.reqs.values() if req.cache_report]
    assert len(reasons) == 2
    misses = {name: count for name, count in rig.scheduler.counters.items() if name.startswith("misses.") and count}
    assert misses == Counter(reasons)

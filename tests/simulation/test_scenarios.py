"""The scorecard's cases about memory pressure, boundaries, order, retraction and prefix hits, on the hash model."""

from functools import partial

import pytest

from forebay.config.engine_config import SchedulePolicy
from forebay.requests.request import Status
from forebay.requests.updates import FinishReason
from forebay.scheduler.admission import MAX_RETRACTIONS
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.rig import greedy, simulation, traffic

# -- C-1 --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("every", [0, 3, 10])
@pytest.mark.parametrize("chunk", [1, 7, 4, 16, 2048])
def test_c1_c26_c28_tokens_do_not_depend_on_chunks_or_retractions(chunk: int, every: int) -> None:
    """1,500 requests over the 15 cases; the oracles compare every token with the reference as it comes."""
    make = partial(RetractingScheduler, every=every)
    load = traffic(num_requests=100, sharing=0.7, arrivals=0.7)
    sim = simulation(chunk * 100 + every, make_scheduler=make, load=load, chunked_prefill_size=chunk, overlap_depth=1)
    while sim.num_added < load.num_requests:
        if sim.rng.random() < load.arrivals:
            sim.arrive()
        sim.turn()
    sim.drain()
    outcome = sim.outcome()
    assert outcome.requests - outcome.refused == sim.oracles.num_finished >= 100
    assert (outcome.retractions > 10) == (every > 0)


# -- B-4 --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("percent", [110, 150])
def test_b4_memory_pressure_retracts_no_request_forever_and_recomputes_little(percent: int, depth: int) -> None:
    """Requests that together need `percent` of the pool, admitted as if they would not grow."""
    sim = simulation(
        percent,
        page_size=1,
        num_pages=160,
        context_length=160,
        schedule_conservativeness=0.01,
        overlap_depth=depth,
        chunked_prefill_size=64,
    )
    each = 160 * percent // 100 // 8
    requests = []
    for wave in range(6):
        for _ in range(8):
            prompt = [sim.rng.randrange(1000) for _ in range(each // 3)]
            sim.add(prompt, greedy(each - each // 3))
            requests.append(sim.scheduler.requests[sim.num_added])
        while wave < 5 and len(sim.scheduler.queues.waiting) > 4:
            sim.turn()
    sim.drain()
    outcome = sim.outcome()
    useful = sum(req.num_prompt + req.num_output for req in requests)
    assert outcome.retractions > 0
    assert max(req.num_retractions for req in requests) <= MAX_RETRACTIONS
    assert outcome.recomputed <= useful * (1.0 if percent == 110 else 2.0)
    assert all(req.num_output == req.params.max_tokens for req in requests)


# -- B-5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 9), (4, 3), (7, 2), (16, 1)])
def test_b5_whatever_is_near_the_capacity_is_refused_on_arrival_or_finishes(
    page_size: int, num_pages: int, depth: int
) -> None:
    """Every second prompt and max_tokens whose sum is within a page of the pool, odd ones and even ones in turn; the
    simulator knows which must be refused."""
    capacity = page_size * num_pages
    sim = simulation(page_size=page_size, num_pages=num_pages, context_length=capacity + 40, overlap_depth=depth)
    for total in range(max(2, capacity - page_size), capacity + page_size + 2):
        for prompt_len in range(1 + total % 2, total, 2):
            tracked = sim.add([sim.rng.randrange(1000) for _ in range(prompt_len)], greedy(total - prompt_len))
            assert (tracked is None) == (total - 1 > capacity)
            sim.drain()
            assert tracked is None or (tracked.finish, len(tracked.received)) == (
                FinishReason.LENGTH,
                total - prompt_len,
            )


def test_b5_the_context_is_a_boundary_too() -> None:
    sim = simulation(context_length=20)
    assert sim.add(range(15), greedy(5))
    assert sim.add(range(15), greedy(6)) is None
    assert sim.add(range(20), greedy(1)) is None
    sim.drain()


# -- B-6 --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("policy", list(SchedulePolicy))
def test_b6_work_behind_a_blocked_head_starts_and_so_does_the_head(policy: SchedulePolicy) -> None:
    sim = simulation(schedule_policy=policy, radix_cache=False, num_pages=24, context_length=96)
    sim.add(range(8), greedy(60))  # leaves room for seven pages
    sim.turn()
    head = sim.accept(range(100, 180), greedy(16))
    head_req = sim.scheduler.requests[head.id]
    behind = sim.accept([1, 2, 3], greedy(4))
    for _ in range(20):
        sim.turn()
        if behind.finish:
            break
    assert behind.received
    assert head_req.status is Status.WAITING
    steps_before = sim.num_steps
    while head_req.status is Status.WAITING and sim.num_steps < steps_before + 400:
        if len(sim.oracles.live) < 6:
            sim.add([sim.rng.randrange(1000)], greedy(6))
        sim.turn()
    assert head_req.status is not Status.WAITING, "small requests keep the head from starting"
    assert sim.num_steps - steps_before <= 200
    sim.drain()


# -- C-3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_c3_c19_hits_of_every_length_are_exactly_as_long_as_they_can_be(page_size: int) -> None:
    """A prompt shares its first n tokens with one that was computed, for every n; cold, warm, flushed, warm again."""
    length = 3 * page_size + 2
    for shared in range(length + 1):
        sim = simulation(page_size=page_size, num_pages=96 // page_size + 12)
        rng = sim.rng
        first = [rng.randrange(500) for _ in range(length)]
        other = first[:shared] + [500 + rng.randrange(500) for _ in range(length - shared)]
        most = min(shared, length - 1) // page_size * page_size
        for flush, prompt, cached in [
            (False, first, 0),
            (False, other, most),
            (False, other, (length - 1) // page_size * page_size),
            (True, other, 0),
            (False, first, most),
        ]:
            if flush:
                sim.scheduler.flush_cache()
            tracked = sim.accept(prompt, greedy(3))
            sim.drain()
            assert tracked.cached_tokens == cached


@pytest.mark.parametrize("page_size", [1, 4])
def test_c3_a_partly_evicted_prefix_still_hits_as_far_as_it_is_there(page_size: int) -> None:
    sim = simulation(page_size=page_size, num_pages=40 // page_size)
    prompt = list(range(24))
    sim.add(prompt, greedy(1))
    sim.drain()
    sim.scheduler.pools.cache.evict(8 // page_size)
    again = sim.accept(prompt, greedy(1))
    sim.drain()
    assert again.cached_tokens == 16


def test_c3_a_conversation_hits_all_of_its_earlier_turns() -> None:
    sim = simulation(page_size=4)
    prompt = list(range(10))
    for _ in range(5):
        turn = sim.accept(prompt, greedy(5))
        sim.drain()
        assert turn.cached_tokens == (len(prompt) - 4 if len(prompt) > 10 else 0) // 4 * 4
        prompt = [*turn.tokens, 7, 8, 9]


def test_a5_namespaces_never_share_even_when_their_tokens_are_equal() -> None:
    sim = simulation()
    for namespace, cached in [("a", 0), ("b", 0), ("", 0), ("a", 8), ("b", 8)]:
        tracked = sim.accept(range(12), greedy(2), namespace=namespace)
        sim.drain()
        assert tracked.cached_tokens == cached

"""Decodes of several tokens, and what may happen among those: C12, C16, C18, C26, C30. The oracles compare every token
with the reference as it comes, and what the cache holds with what the tokens leave."""

from collections.abc import Sequence
from typing import Any

import pytest

from forebay.config.engine_config import SchedulerConfig
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason
from tests.simulation.oracles import Tracked
from tests.simulation.rig import HYBRIDS, Scripted, config, greedy, hybrid, wide

W = 4
PROMPT = list(range(10))
KINDS = ("plain", *HYBRIDS)
SIDES = [("host", 0), ("host", 1), ("device", 0), ("device", 1), ("device", 2)]
on_all_sides = pytest.mark.parametrize(("side", "depth"), SIDES)
of_all_kinds = pytest.mark.parametrize("kind", KINDS)


def engine(kind: str, depth: int = 0, **changes: Any) -> SchedulerConfig:
    return config(overlap_depth=depth, **changes) if kind == "plain" else hybrid(kind, overlap_depth=depth, **changes)


def asked(sim: Scripted, num_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What the reference says to a prompt that is asked once to see that; the cache has it no more."""
    tracked = sim.accept(prompt, greedy(num_tokens))
    sim.drain()
    sim.scheduler.flush_cache()
    return tracked.received


def decoded(sim: Scripted, tracked: Tracked, num_tokens: int = 1) -> None:
    while len(tracked.received) < num_tokens:
        sim.turn()


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@of_all_kinds
@on_all_sides
def test_c16_a_stop_token_ends_its_request_at_every_place_among_the_accepted(side: str, depth: int, kind: str) -> None:
    sim = wide(engine(kind, depth), side, W)
    right = asked(sim, 2 * W + 2)
    assert sim.scheduler.counters["accepted_tokens"] > W
    for stop in right:
        tracked = sim.accept(PROMPT, SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,)))
        sim.drain()
        assert (tracked.received, tracked.finish) == (right[: right.index(stop) + 1], FinishReason.STOP)


@pytest.mark.quick(2)
@of_all_kinds
@on_all_sides
def test_c16_no_token_comes_behind_the_last_one_wherever_that_is_among_the_accepted(
    side: str, depth: int, kind: str
) -> None:
    sim = wide(engine(kind, depth), side, W)
    right = asked(sim, 3 * W)
    for num_tokens in range(1, 3 * W):
        tracked = sim.accept(PROMPT, greedy(num_tokens))
        sim.drain()
        assert (tracked.received, tracked.finish) == (right[:num_tokens], FinishReason.LENGTH)


@pytest.mark.quick(2)
@pytest.mark.parametrize("page_size", [1, 4, 7])
@on_all_sides
def test_b5_c16_the_end_of_the_context_and_of_the_pool_is_a_boundary_for_drafts_too(
    side: str, depth: int, page_size: int
) -> None:
    """The device raises what is written where no page is."""
    sim = wide(config(overlap_depth=depth, page_size=page_size, num_pages=-(-24 // page_size), context_length=24), side)
    for num_prompt in range(1, 24):
        tracked = sim.accept(range(num_prompt), greedy(24 - num_prompt))
        sim.drain()
        assert len(tracked.received) == 24 - num_prompt


# -- what stays -------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_right", [0, 1, W])
@on_all_sides
def test_c16_the_cache_has_of_a_request_what_was_accepted_and_not_a_token_more(
    side: str, depth: int, num_right: int
) -> None:
    sim = wide(config(page_size=1, num_pages=100, overlap_depth=depth), side, W)
    right = asked(sim, 2 * W + 1)
    sim.propose.right = num_right
    for at, stop in enumerate(right[:-1]):
        sim.add(PROMPT, SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,)))
        sim.drain()
        again = sim.accept([*PROMPT, *right[: at + 2]], greedy(1))
        sim.drain()
        known = len(PROMPT) + at + 1
        # The stop token has KV where tokens behind it were accepted as well, or a step was in flight that computed it.
        assert again.cached_tokens in (known - 1, known)
        assert again.cached_tokens == known - 1 or num_right > 0 or depth > 0
        sim.scheduler.flush_cache()


@pytest.mark.quick(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["extra_buffer", "both"])
def test_c16_c18_a_state_is_tracked_at_its_length_wherever_that_is_among_the_accepted(kind: str, depth: int) -> None:
    """Every 32 tokens: with all widths and lengths of prompts such a length is at every place of a step."""
    for width in (2, 5, 7):
        for num_prompt in range(1, 1 + width):
            sim = wide(engine(kind, depth, page_size=16, num_tokens=256), "device", width)
            turn = sim.accept(range(num_prompt), greedy(70))
            sim.drain()
            sim.oracles.check_cache()
            again = sim.accept([*turn.tokens, 7], greedy(2))
            sim.drain()
            assert again.cached_tokens == 64


# -- with widths in flight --------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_right", [0, W])
@pytest.mark.parametrize("depth", [0, 1, 2])
@of_all_kinds
def test_c16_c28_an_abort_with_wide_steps_in_flight_leaves_nothing_that_was_not_accepted(
    kind: str, depth: int, num_right: int
) -> None:
    for num_tokens in range(1, 10):
        sim = wide(engine(kind, depth), "device", W)
        sim.propose.right = num_right
        tracked = sim.accept(PROMPT, greedy(40))
        decoded(sim, tracked, num_tokens)
        while len(sim.flights) <= depth:
            assert sim.launched().width == W
        sim.abort(tracked.id)
        sim.runner.check_in_flight()
        sim.oracles.check_cache()
        again = sim.accept([*tracked.tokens, 5], greedy(6))
        sim.drain()
        assert again.cached_tokens is not None
        assert again.cached_tokens <= len(tracked.tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_c12_c26_a_victim_is_planned_no_more_and_gives_way_when_its_length_is_known(depth: int) -> None:
    """Two that grow into a pool that holds one and a half of them."""
    sim = wide(config(page_size=1, num_pages=40, overlap_depth=depth, schedule_conservativeness=0.01), "device", W)
    first, second = (sim.accept([at, *PROMPT], greedy(20)) for at in (100, 200))
    victim = sim.scheduler.requests[second.id]
    num_waited = 0
    while not victim.num_retractions:
        unknown = victim.allocation.num_drafts if victim.maybe_allocation else 0
        plan = sim.launch()
        num_waited += bool(unknown) and (plan is None or victim.allocation.row not in plan.rows)
        if plan is None or len(sim.flights) > depth:
            sim.land()
    assert num_waited
    sim.drain()
    assert (len(first.received), len(second.received)) == (20, 20)


@pytest.mark.quick(2)
@pytest.mark.parametrize("host", [False, True])
@of_all_kinds
def test_c26_tokens_are_the_same_after_retractions_between_wide_steps(kind: str, host: bool) -> None:
    changes = {"host": host} if kind != "plain" else {}
    for every in (2, 3, 5):
        sim = wide(engine(kind, 1, **changes), "device", W)
        sim.propose.right = 1
        sim.scheduler.every = every
        requests = [sim.accept([at, *PROMPT], greedy(20)) for at in range(100, 104)]
        while not sim.scheduler.idle:
            sim.turn()
        assert sim.outcome().retractions
        assert all(len(request.received) == 20 for request in requests)


# -- not finite -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_right", range(W))
def test_c30_non_finite_values_behind_the_first_rejection_fail_no_request(kind: str, num_right: int) -> None:
    for position in range(W):
        sim = wide(engine(kind), "device", W)
        sim.propose.right = num_right
        tracked = sim.accept(PROMPT, greedy(20))
        decoded(sim, tracked)
        sim.launch()
        result = sim.land({0: position})
        assert result is not None
        harmed = position <= num_right
        assert (result.failed, result.num_new) == ((0,) if harmed else (), [1 + min(position, num_right)])
        sim.drain()
        assert tracked.finish is (FinishReason.ERROR if harmed else FinishReason.LENGTH)
        assert len(tracked.received) == (1 + position if harmed else 20)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("ending", ["stop", "length"])
def test_c16_c30_an_end_before_what_is_not_finite_comes_first(ending: str, depth: int, kind: str) -> None:
    """As without drafts: nobody would have gone on to it. The cache has nothing of that step."""
    sim = wide(engine(kind, depth), "device", W)
    right = asked(sim, W + 1)
    for position in range(1, W):
        for place in range(1, W):
            if ending == "stop":
                params = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(right[place],))
                place = right.index(right[place])
                if place == 0:  # which no draft is
                    continue
            else:
                params = greedy(place + 1)
            tracked = sim.accept(PROMPT, params)
            decoded(sim, tracked)
            while len(sim.flights) <= depth and sim.launch():
                pass
            sim.land({0: position})
            ended = min(position, place) + 1
            assert (tracked.received, tracked.finish) == (right[:ended], ends_with(ending, place <= position))
            sim.drain()
            sim.oracles.check_cache()
            sim.scheduler.flush_cache()


def ends_with(ending: str, comes_first: bool) -> FinishReason:
    return FinishReason(ending) if comes_first else FinishReason.ERROR


# -- who proposes -----------------------------------------------------------------------------------------------------


def test_who_proposes_on_the_host_is_asked_when_the_last_token_is_known() -> None:
    sim = wide(config(overlap_depth=2), "host", W)
    tracked = sim.accept(PROMPT, greedy(20))
    decoded(sim, tracked)
    assert sim.launched().width == W
    assert sim.launch() is None
    sim.drain()


@on_all_sides
def test_steps_with_prompts_decode_a_token_each(side: str, depth: int) -> None:
    sim = wide(config(overlap_depth=depth, chunked_prefill_size=4), side, W)
    tracked = sim.accept(PROMPT, greedy(20))
    decoded(sim, tracked)
    sim.add([50, *PROMPT], greedy(4))
    while sim.flights:
        sim.land()
    plan = sim.launched()
    assert (plan.num_extends, plan.num_decodes, plan.width) == (1, 1, 1)
    sim.drain()

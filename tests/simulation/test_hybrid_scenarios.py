"""The scorecard's cases about states, windows and anchors, on the hash model: A-3, B-5, C-1, C-3, C-9."""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from forebay.memory.holding import footprint
from forebay.memory.radix_node import Node
from forebay.memory.slots import Ids
from forebay.requests.updates import FinishReason, MissReason
from tests.kinds_of import num_states, num_window_pages, states_of, windows_of
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.rig import HYBRIDS, WINDOW, Scripted, greedy, hybrid, simulation_of, traffic

RECURRENT = [kind for kind in HYBRIDS if kind != "windows"]


def fresh(sim: Scripted, length: int) -> list[int]:
    return [sim.rng.randrange(1000) for _ in range(length)]


# -- A-3 --------------------------------------------------------------------------------------------------------------


def finished(sim: Scripted) -> None:
    sim.add(fresh(sim, 20), greedy(6))
    sim.drain()


def aborted(sim: Scripted) -> None:
    """In the middle of its prompt, with a step in flight."""
    prompt = sim.accept(fresh(sim, 40), greedy(6))
    sim.turn()
    sim.launch()
    sim.abort(prompt.id)
    sim.drain()


def not_admitted(sim: Scripted) -> None:
    """Pages were there, and then something broke."""

    def broken(reqs: object) -> None:
        raise RuntimeError("no rows")

    pools = sim.scheduler.pools
    waiting = sim.accept(fresh(sim, 20), greedy(6))
    req = sim.scheduler.requests[waiting.id]
    match = sim.scheduler.memory.prefixes.match(req)
    match, pin = sim.scheduler.memory.prefixes.pin(req, match)
    need = footprint(len(req.tokens), pools.page_size, pin.num_pages)
    with patch.object(pools.rows, "alloc", broken), pytest.raises(RuntimeError, match="no rows"):
        sim.scheduler.memory.allocator.admit(req, match, pin, need)
    sim.scheduler.audit()
    sim.abort(waiting.id)


def evicted(sim: Scripted) -> None:
    """Every other cached state."""
    cached = states_of(sim.scheduler.pools)
    cached.in_tree.evict(cached.num_cached // 2)


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["extra_buffer", "no_buffer"])
def test_a3_a_slot_is_as_good_as_new_whatever_became_of_its_last_tenant(kind: str, depth: int) -> None:
    """240 requests over the four cases, each in slots that held another's state, poisoned since; the oracles compare
    every token with the reference."""
    sim = simulation_of(hybrid(kind, overlap_depth=depth, max_running_requests=2, spare_slots=3, num_tokens=256))
    for i in range(60):
        [finished, aborted, not_admitted, evicted][i % 4](sim)
        tracked = sim.accept(fresh(sim, 5 + i % 16), greedy(1 + i % 5))
        sim.drain()
        assert (tracked.finish, len(tracked.received)) == (FinishReason.LENGTH, 1 + i % 5)
    handed_out = states_of(sim.scheduler.pools).pool.generation[1:]
    assert len(np.unique(handed_out)) > 1
    assert handed_out.min() > 40, "a slot was used by few"


@pytest.mark.quick(2)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a3_c18_what_is_in_the_cache_was_written_by_steps_that_have_completed(kind: str, depth: int) -> None:
    """Looked at between every launch and the next result, when any step in flight has written nothing yet."""
    sim = simulation_of(hybrid(kind, overlap_depth=depth))
    system = fresh(sim, 12)
    for _ in range(24):
        sim.add(system[: sim.rng.randrange(13)] + fresh(sim, 9), greedy(12))
        for _ in range(4):
            sim.launch()
            sim.oracles.check_cache()
            while len(sim.flights) > depth:
                sim.land()
                sim.oracles.check_cache()
    sim.drain()
    assert sim.oracles.num_hits > 5


# -- B-5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_b5_with_no_slot_or_window_to_spare_whatever_fits_the_pool_finishes(kind: str, rows: int, depth: int) -> None:
    """Every prompt and max_tokens whose sum is within a page of the pool, two at a time, over a cache that is full."""
    asked = hybrid(
        kind,
        page_size=4,
        num_tokens=12,
        spare_slots=0,
        spare_windows=0,
        max_running_requests=rows,
        overlap_depth=depth,
        chunked_prefill_size=5,
    )
    sim = simulation_of(asked)
    system = fresh(sim, 6)
    for total in range(8, 14):
        for prompt_len in range(1, total):
            prompt = (system + fresh(sim, 12))[:prompt_len]
            pair = [sim.accept(prompt, greedy(total - prompt_len)) for _ in range(2)]
            sim.drain()
            assert [len(tracked.received) for tracked in pair] == [total - prompt_len] * 2


# -- C-1 --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("every", [0, 3, 10])
@pytest.mark.parametrize("chunk", [1, pytest.param(7, marks=pytest.mark.slow), 4, 16, 2048])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_c1_c26_c28_tokens_do_not_depend_on_chunks_or_retractions(kind: str, chunk: int, every: int) -> None:
    """2,040 requests over the 60 cases; every other one keeps its memory on the host when it is retracted."""
    asked = hybrid(kind, chunked_prefill_size=chunk, overlap_depth=1, host=every == 3)
    make = partial(RetractingScheduler, every=every)
    load = traffic(num_requests=34, sharing=0.7, arrivals=0.7)
    sim = simulation_of(asked, chunk * 100 + every, make_scheduler=make, load=load)
    while sim.num_added < load.num_requests:
        if sim.rng.random() < load.arrivals:
            sim.arrive()
        sim.turn()
    sim.drain()
    outcome = sim.outcome()
    assert outcome.requests - outcome.refused == sim.oracles.num_finished >= 34
    assert outcome.retractions > 2 or not every
    assert bool(outcome.offloaded) == (every == 3)


# -- C-3 --------------------------------------------------------------------------------------------------------------


def resumable(sim: Scripted, prompt: list[int]) -> int:
    """The longest cached beginning of a prompt at whose end there is a state and in front of whose end there is a
    window; looked for token by token."""
    pools, ps = sim.scheduler.pools, sim.config.page_size
    best = 0

    def look(node: Node, tokens: list[int], pages: Ids) -> None:
        nonlocal best
        for child in node.children.values():
            path = tokens + np.frombuffer(child.key, dtype=np.int32).tolist()
            held_pages = np.concatenate([pages, child.pages])
            ends = [len(path)] if states_of(pools) else range(len(tokens) + ps, len(path) + 1, ps)
            for end in ends:
                needed = held_pages[max(0, end - WINDOW + 1) // ps : end // ps]
                there = windows_of(pools) is None or windows_of(pools).map.full_to_window[needed].all()
                if (
                    path[:end] == prompt[:end]
                    and end < len(prompt)
                    and there
                    and (not states_of(pools) or states_of(pools).in_tree.slot_of(child))
                ):
                    best = max(best, end)
            look(child, path, held_pages)

    for root in pools.cache.index.roots.values():
        look(root, [], np.empty(0, dtype=np.int64))
    return best


@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_c3_c18_c19_hits_of_every_length_end_at_the_last_place_that_can_be_resumed(kind: str, page_size: int) -> None:
    """A prompt shares its first n tokens with one that was computed, for every n: cold, warm, at the branching point
    that is known by then, flushed, and warm again."""
    asked = hybrid(kind, page_size=page_size, num_tokens=96 + 24 * page_size, max_running_requests=2, spare_slots=40)
    page_size = asked.page_size
    length = 3 * page_size + 2
    whole = (length - 1) // page_size * page_size
    for shared in range(length + 1):
        sim = simulation_of(asked)
        first = [sim.rng.randrange(300) for _ in range(length)]
        other, third = (
            first[:shared] + [at + sim.rng.randrange(300) for _ in range(length - shared)] for at in (300, 600)
        )
        most = min(shared // page_size * page_size, whole)
        for prompt, least in [(first, 0), (first, whole), (other, 0), (other, whole), (third, most), (first, whole)]:
            expected = resumable(sim, prompt)
            tracked = sim.accept(prompt, greedy(3))
            sim.drain()
            assert tracked.cached_tokens == expected
            assert expected >= least or (kind == "windows" and prompt is third)
        sim.scheduler.flush_cache()
        tracked = sim.accept(other, greedy(3))
        sim.drain()
        assert tracked.cached_tokens == 0


@pytest.mark.parametrize("kind", HYBRIDS)
def test_c3_c20_of_a_partly_evicted_prefix_what_can_be_resumed_is_still_hit(kind: str) -> None:
    sim = simulation_of(hybrid(kind, max_running_requests=2))
    pools, prompt = sim.scheduler.pools, fresh(sim, 30)
    for fraction in (1, 2, 3):
        sim.add(prompt, greedy(2))
        sim.drain()
        if states_of(pools):
            states_of(pools).in_tree.evict(states_of(pools).num_cached // fraction)
        if windows_of(pools):
            windows_of(pools).in_tree.evict(windows_of(pools).num_cached // fraction)
        expected = resumable(sim, prompt)
        again = sim.accept(prompt, greedy(2))
        sim.drain()
        assert again.cached_tokens == expected
        report = again.report
        assert report is not None
        assert report.miss_reason in (MissReason.NONE, MissReason.STATE_MISSING, MissReason.WINDOW_MISSING)
        assert (report.miss_reason is MissReason.NONE) == (expected == report.kv_tokens)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_c3_a_conversation_hits_all_of_its_earlier_turns(kind: str) -> None:
    sim = simulation_of(hybrid(kind, max_running_requests=2, num_tokens=256))
    ps, prompt = sim.config.page_size, list(range(10))
    for i in range(5):
        turn = sim.accept(prompt, greedy(5))
        sim.drain()
        reusable = (len(prompt) - 4) // ps * ps if i else 0
        assert turn.cached_tokens is not None
        assert reusable - 2 * ps <= turn.cached_tokens <= reusable
        prompt = [*turn.tokens, 7, 8, 9]


# -- C-9 --------------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_c9_flush_with_steps_in_flight_changes_no_token_and_leaves_no_stale_hit(kind: str, depth: int) -> None:
    sim = simulation_of(hybrid(kind, overlap_depth=depth))
    pools, system = sim.scheduler.pools, fresh(sim, 14)
    for i in range(30):
        sim.add(system + fresh(sim, 6), greedy(8))
        sim.turn()
        sim.launch()
        if i % 3 == 0:
            sim.scheduler.flush_cache()
        while len(sim.flights) > depth:
            sim.land()
    sim.drain()
    assert sim.oracles.num_hits
    sim.scheduler.flush_cache()
    assert pools.cache.num_pages == 0
    assert states_of(pools) is None or states_of(pools).pool.num_free == num_states(sim.config.kinds)
    assert windows_of(pools) is None or windows_of(pools).slots.num_free == num_window_pages(sim.config.kinds)
    cold = sim.accept(system + fresh(sim, 6), greedy(8))
    sim.drain()
    assert cold.cached_tokens == 0


@pytest.mark.parametrize("kind", HYBRIDS)
def test_c9_a_new_version_of_the_weights_never_goes_on_from_states_of_the_old_one(kind: str) -> None:
    """A version is a namespace: the hash model computes other states in it, so a stale one would show in the tokens."""
    sim = simulation_of(hybrid(kind))
    prompt = fresh(sim, 18)
    for version, cached in [("1", False), ("1", True), ("2", False), ("1", True), ("2", True)]:
        tracked = sim.accept(prompt, greedy(4), namespace=version)
        sim.drain()
        assert bool(tracked.cached_tokens) == cached

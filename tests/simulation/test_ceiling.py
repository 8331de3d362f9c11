"""Requests that end near the pool's ceiling: each is refused at once, or ends with all its tokens, and no prompt is
computed twice for want of pages that cannot come (C26, C27; vLLM #52520)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from forebay.base.errors import RequestTooLarge
from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.requests.updates import FinishReason
from tests.scheduler.rig import Rig
from tests.scheduler.roles import arrive, decode
from tests.simulation.oracles import Tracked
from tests.simulation.rig import HYBRIDS, Scripted, greedy, hybrid, simulation_of, wide
from tests.simulation.rig import config as plain

PAGES, PAGES_AWAY = 12, 3
KINDS = ("plain", *HYBRIDS)
DRAFTS = ("none", "host", "device")


def tight(kind: str, depth: int, chunk: int) -> SchedulerConfig:
    """No more states and windows than rows need, and a context that is longer than the pool."""
    changes: dict[str, Any] = {
        "overlap_depth": depth,
        "chunked_prefill_size": chunk,
        "max_running_requests": 2,
        "context_length": 1000,
    }
    if kind == "plain":
        return plain(num_pages=PAGES, **changes)
    num_tokens = PAGES * (1 if kind == "no_buffer" else 4)
    return hybrid(kind, num_tokens=num_tokens, spare_slots=0, spare_windows=0, **changes)


def simulated(kind: str, depth: int, drafts: str, chunk: int = 7) -> Scripted:
    asked = tight(kind, depth, chunk)
    return simulation_of(asked) if drafts == "none" else wide(asked, drafts)


def sizes(page_size: int) -> Iterator[tuple[int, int]]:
    """Prompts and outputs that together end up to three pages below and above the pool, in long and short outputs."""
    pool = PAGES * page_size
    for total in range(pool - PAGES_AWAY * page_size, pool + PAGES_AWAY * page_size + 2):
        for output in {1, 2, page_size + 1, total // 2}:
            yield total - output, output


def ended(sim: Scripted, tracked: Tracked | None, num_kv: int) -> bool:
    """Whether the request was let in, which it must be if it fits; it has then all its tokens."""
    fits = num_kv <= sim.config.num_pages * sim.config.page_size
    assert (tracked is not None) == fits
    if tracked is not None:
        assert (tracked.finish, len(tracked.received)) == (FinishReason.LENGTH, tracked.params.max_tokens)
    return fits


@pytest.mark.quick(1)
@pytest.mark.parametrize("depth", [1, 0, 2])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_c27_one_request_that_ends_near_the_ceiling_is_refused_or_computed_once(
    kind: str, drafts: str, depth: int
) -> None:
    sim = simulated(kind, depth, drafts)
    computed = refused = 0
    for prompt, output in sizes(sim.config.page_size):
        before = sim.scheduler.counters["computed_prompt_tokens"]
        tracked = sim.add([sim.rng.randrange(1000) for _ in range(prompt)], greedy(output))
        sim.drain()
        let_in = ended(sim, tracked, prompt + output - 1)
        computed, refused = computed + let_in, refused + (not let_in)
        assert sim.scheduler.counters["computed_prompt_tokens"] - before <= prompt * let_in
    assert min(computed, refused) > 0
    assert sim.scheduler.counters.get("retractions", 0) == 0


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_c26_two_requests_that_fit_alone_near_the_ceiling_both_end_with_a_bounded_recomputation(
    kind: str, drafts: str
) -> None:
    """Each needs nearly all pages in the end: one gives way, and is computed again once the other has ended."""
    sim = simulated(kind, 1, drafts)
    for prompt, output in sizes(sim.config.page_size):
        before = sim.scheduler.counters["computed_prompt_tokens"]
        started = sim.scheduler.counters.get("retractions", 0)
        prompts = [[sim.rng.randrange(1000) for _ in range(prompt)] for _ in range(2)]
        both = [sim.add(own, greedy(output)) for own in prompts]
        sim.drain()
        let_in = [ended(sim, tracked, prompt + output - 1) for tracked in both]
        num_retracted = sim.scheduler.counters.get("retractions", 0) - started
        most = sum(let_in) * prompt + num_retracted * (prompt + output)
        assert sim.scheduler.counters["computed_prompt_tokens"] - before <= most
        assert num_retracted <= 2


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_lost", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "windows", "both"])
def test_c27_one_request_that_no_longer_fits_beside_lost_pages_ends_typed(kind: str, num_lost: int) -> None:
    """Pages that are set aside for good lower the ceiling: for those that come then, and for one that has come."""
    asked = replace(tight(kind, 1, 7), ledger=Ledger.COUNT)
    for num_pages in range(PAGES - num_lost - 2, PAGES + 1):
        for output, late in ((1, False), (2 * asked.page_size, False), (4 * asked.page_size, True)):
            rig = Rig(depth=1, **{field.name: getattr(asked, field.name) for field in fields(asked)})
            kv, prompt = rig.scheduler.pools.kv, num_pages * asked.page_size - output + 1
            if late:
                rig.add(prompt, max_new=output)
                rig.launch()
            kv.quarantine(kv.take_ids(num_lost, 99), 99, "lost")
            fits = num_pages <= PAGES - num_lost
            if not late and not fits:
                with pytest.raises(RequestTooLarge, match="pages"):
                    rig.add(prompt, max_new=output)
                continue
            if not late:
                rig.add(prompt, max_new=output)
            rig.run()
            assert rig.finish_of(rig.reqs[1]) is (FinishReason.LENGTH if fits else FinishReason.ERROR)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["plain", "windows", "both"])
def test_c27_decode_offers_places_to_a_request_near_the_ceiling_or_refuses_it(kind: str) -> None:
    """Of prompts that other engines compute, and that decode may have to compute again."""
    asked = replace(tight(kind, 0, 7), radix_cache=False)
    given = {field.name: getattr(asked, field.name) for field in fields(asked) if field.name != "disaggregation"}
    half = decode(extra=0, **given)
    for room, (prompt, output) in enumerate(sizes(asked.page_size), 1):
        if prompt + output - 1 > PAGES * asked.page_size:
            with pytest.raises(RequestTooLarge, match=r"pages|tokens"):
                half.meet(prompt, room, max_new=output)
            continue
        req = half.meet(prompt, room, max_new=output)
        half.step()
        offer = half.orders.pop()
        assert offer.ticket.room == room, "no places are offered although nothing else is there"
        arrive(half, offer)
        half.run()
        assert len(half.tokens_of(req)) == output
    assert half.scheduler.counters["computed_prompt_tokens"] == 0

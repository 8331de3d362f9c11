"""Rows whose requests change between the launch of a step and its commit, with decodes of each width (C8, C28)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.simulation.retracting import RetractingScheduler
from tests.simulation.rig import HYBRIDS, Scripted, greedy, hybrid, wide
from tests.simulation.rig import config as plain

KINDS = ("plain", *HYBRIDS)


def simulated(kind: str, proposed_on: str, width: int) -> Scripted:
    """Few rows, so that each is given to another request at once."""
    changes: dict[str, Any] = {"overlap_depth": 2, "max_running_requests": 3, "chunked_prefill_size": 9}
    made = plain(**changes) if kind == "plain" else hybrid(kind, spare_slots=1, spare_windows=0, **changes)
    return wide(made, proposed_on, width, make_scheduler=partial(RetractingScheduler, every=5, skips=True))


def move(sim: Scripted, at: int) -> None:
    """An abort, an arrival or a flush: by turns, between launches. The scheduler retracts one in every fifth plan."""
    rng = sim.rng
    if at % 4 == 0 and sim.oracles.live:
        sim.abort(rng.choice(sorted(sim.oracles.live)))
    if at % 3 == 0:
        sim.add([rng.randrange(1000) for _ in range(rng.randint(1, 20))], greedy(rng.randint(1, 12)))
    if at % 11 == 0:
        sim.scheduler.flush_cache()


@pytest.mark.quick(6)
@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("proposed_on", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_c28_rows_that_move_between_launch_and_commit_keep_their_tokens(
    kind: str, proposed_on: str, width: int
) -> None:
    """The oracles compare each token, each length and each pool; commits come as late as they may."""
    sim = simulated(kind, proposed_on, width)
    if sim.proposer:
        sim.proposer.made_up = 0.5
    sim.propose.right = width // 2
    for at in range(90):
        move(sim, at)
        sim.launch()
        if len(sim.flights) > sim.config.overlap_depth or at % 7 == 6:
            sim.land()
        sim.oracles.check()
    sim.drain()
    assert sim.scheduler.counters["draft_tokens"] >= sim.scheduler.counters["accepted_tokens"] > 0

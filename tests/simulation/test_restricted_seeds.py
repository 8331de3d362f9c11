"""Random traffic of which most requests may not have some tokens."""

from __future__ import annotations

import pytest

from tests.simulation import sleeping
from tests.simulation.event_log import Outcome
from tests.simulation.pair import run_pair
from tests.simulation.simulator import run_seed

PER_CHUNK = 10
QUICK = 1  # its traffic is of the kind that finds bugs; that of any ten seeds need not be
SLOW = [pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(100) if chunk != QUICK]
SHARE = 0.7


@pytest.mark.long
@pytest.mark.parametrize("chunk", [QUICK, *SLOW])
def test_c16_c22_c26_outputs_are_the_references_under_restrictions_too(chunk: int) -> None:
    seeds = range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)
    outcome = sum((run_seed(seed, restricted=SHARE) for seed in seeds), Outcome(seeds=0))
    for seed in seeds[:3]:
        sleeping.run_seed(seed, restricted=SHARE)
    arrived = sum(run_pair(seed, restricted=SHARE).arrived for seed in seeds[:3])
    if chunk == QUICK:
        assert outcome.retractions >= 2
        assert outcome.accepted >= 25
        assert arrived > 3

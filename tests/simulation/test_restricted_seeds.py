"""Random traffic of which most requests may not have some tokens."""

from __future__ import annotations

import pytest

from tests.simulation import sleeping
from tests.simulation.event_log import Outcome
from tests.simulation.pair import run_pair
from tests.simulation.simulator import run_seed

PER_CHUNK = 20
SLOW = [pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 50)]
SHARE = 0.7


@pytest.mark.long
@pytest.mark.parametrize("chunk", [0, *SLOW])
def test_c16_c22_c26_outputs_are_the_references_under_restrictions_too(chunk: int) -> None:
    seeds = range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)
    outcome = sum((run_seed(seed, restricted=SHARE) for seed in seeds), Outcome(seeds=0))
    for seed in seeds[:5]:
        sleeping.run_seed(seed, restricted=SHARE)
    arrived = sum(run_pair(seed, restricted=SHARE).arrived for seed in seeds[:5])
    if chunk == 0:  # the traffic is of the kind that finds bugs; any twenty seeds need not be
        assert outcome.retractions >= 3
        assert outcome.accepted >= 50
        assert arrived > 5

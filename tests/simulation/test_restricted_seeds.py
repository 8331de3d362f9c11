"""Random traffic of which most requests may not have some tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation import sleeping
from tests.simulation.event_log import Outcome
from tests.simulation.pair import run_pair
from tests.simulation.simulator import run_seed

PER_CHUNK = 10
QUICK = (11, 13, 14, 15, 19)  # their traffic is of the kind that finds bugs; that of any seeds need not be
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 1000, PER_CHUNK)]
SHARE = 0.7


@pytest.mark.long
@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c16_c22_c26_outputs_are_the_references_under_restrictions_too(seeds: Sequence[int]) -> None:
    outcome = sum((run_seed(seed, restricted=SHARE) for seed in seeds), Outcome(seeds=0))
    for seed in seeds[:2]:
        sleeping.run_seed(seed, restricted=SHARE)
    arrived = sum(run_pair(seed, restricted=SHARE).arrived for seed in seeds[:2])
    if seeds is QUICK:
        assert outcome.retractions >= 2
        assert outcome.accepted >= 25
        assert arrived > 3

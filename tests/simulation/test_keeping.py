"""Prefixes that clients want kept: traffic, pressure, flushes, retractions and tenants (C8, C19, C27)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.event_log import Outcome
from tests.simulation.simulator import run_seed

PER_CHUNK = 20
BUSY = (6, 65, 114, 117)  # seeds in which prefixes are kept, refused and given up; of the odd ones several tenants
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 1000, PER_CHUNK)]


@pytest.mark.parametrize("seeds", [BUSY, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c27_kept_prefixes_random_traffic_gives_the_tokens_of_the_reference(seeds: Sequence[int]) -> None:
    outcome = sum((run_seed(seed, keeping=True, tenants=seed % 2 == 1) for seed in seeds), Outcome(seeds=0))
    assert outcome.seeds == len(seeds)
    if seeds is BUSY:
        assert min(outcome.kept, outcome.not_kept, outcome.given_up) >= 40

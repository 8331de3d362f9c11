"""Prefixes that clients want kept: traffic, pressure, flushes, retractions and tenants (C8, C19, C27)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation import sleeping
from tests.simulation.event_log import Outcome
from tests.simulation.simulator import run_seed
from tests.simulation.sleeping import SleepOutcome

PER_CHUNK = 20
BUSY = (6, 65, 114, 117)  # seeds in which prefixes are kept, refused and given up; of the odd ones several tenants
SLEEPY = (46, 89, 123, 127)  # seeds that sleep with kept prefixes, and keep some of them
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 1000, PER_CHUNK)]


@pytest.mark.parametrize("seeds", [BUSY, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c27_kept_prefixes_random_traffic_gives_the_tokens_of_the_reference(seeds: Sequence[int]) -> None:
    outcome = sum((run_seed(seed, keeping=True, tenants=seed % 2 == 1) for seed in seeds), Outcome(seeds=0))
    assert outcome.seeds == len(seeds)
    if seeds is BUSY:
        assert min(outcome.prefixes_kept, outcome.prefixes_not_kept, outcome.given_up) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [SLEEPY, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c25_kept_prefixes_outlast_a_sleep_that_keeps_the_cache_and_no_other(seeds: Sequence[int]) -> None:
    outcome = sum((sleeping.run_seed(seed, keeping=True) for seed in seeds), SleepOutcome(seeds=0))
    assert outcome.seeds == len(seeds)
    if seeds is SLEEPY:
        assert min(outcome.sleeps, outcome.prefixes_kept, outcome.retained) >= 5

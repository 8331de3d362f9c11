"""Tiers of the prefix cache behind the device: random traffic, losses and eviction (C8, C18, C19)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.cache_tiers import run_tiers
from tests.simulation.event_log import Outcome
from tests.simulation.simulator import run_seed

PER_CHUNK = 20
KEEPING = (117, 229)  # seeds in which clients want prefixes kept, and tiers have to give some up
BUSY = (5, 6, 33, 56, 230)  # seeds with many loads, some of which are lost; the last has few states
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 1000, PER_CHUNK)]


@pytest.mark.parametrize("seeds", [BUSY, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c19_tiers_random_traffic_gives_the_tokens_of_the_reference(seeds: Sequence[int]) -> None:
    outcome = sum((run_seed(seed, tiers=True) for seed in seeds), Outcome(seeds=0))
    assert outcome.seeds == len(seeds)
    if seeds is BUSY:
        assert outcome.fetched >= 50
        assert outcome.lost >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [KEEPING, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c8_tiers_with_kept_prefixes_give_the_tokens_of_the_reference(seeds: Sequence[int]) -> None:
    outcome = sum((run_tiers(seed) for seed in seeds), Outcome(seeds=0))
    assert outcome.seeds == len(seeds)
    if seeds is KEEPING:
        assert min(outcome.fetched, outcome.prefixes_kept, outcome.given_up_in_tiers) >= 20

"""Events of the prefix cache under random traffic: a subscriber knows what the trees have (C18, C34)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.published import run_published

QUICK = (0, 1, 5, 14)
PER_CHUNK = 50
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 500, PER_CHUNK)]


@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_events_replayed_after_random_traffic_equal_the_trees(seeds: Sequence[int]) -> None:
    for seed in seeds:
        run_published(seed)

"""Self-checks of the prefix cache between, and in the middle of, random traffic (C19, C27, C30)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.checked import CheckOutcome, run_checked

PER_CHUNK = 20
BUSY = (349,)  # a seed with many checks, of tiers as well; the end of one fails
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, 1000, PER_CHUNK)]


@pytest.mark.parametrize("seeds", [BUSY, *SLOW], ids=lambda seeds: str(seeds[0]))
def test_c30_checks_in_random_traffic_find_nothing_and_change_no_token(seeds: Sequence[int]) -> None:
    outcome = sum(map(run_checked, seeds), CheckOutcome(seeds=0))
    assert outcome.seeds == len(seeds)
    if seeds is BUSY:
        assert min(outcome.checks, outcome.stopped) >= 10

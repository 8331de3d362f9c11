"""Engines with 2 and 3 ranks under random traffic: one log, one runner's tokens, and no rank that waits for ever.

More seeds: `python -m tests.simulation.ranked --seeds 0:2000 --jobs 2`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.ranked import RankedOutcome, run_seed

QUICK = (8, 31, 36, 42)  # short, and each mutant that names the test fails with one of them
PER_CHUNK, ALL = 50, 2000  # seeds of the long tier
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, ALL, PER_CHUNK)]


@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_c19_c28_c30_ranks_random_traffic_execute_one_log_and_give_one_runners_tokens(seeds: Sequence[int]) -> None:
    outcome = sum(map(run_seed, seeds), RankedOutcome(seeds=0))
    assert outcome.seeds == len(seeds)
    assert outcome.entries > outcome.steps > len(seeds)
    assert min(outcome.captures, outcome.rank_failures, outcome.rows_failed) > 0

"""The real workers, sides, sessions and movers under random faults, in virtual time (C22, C33).

A failure's note has the line that replays it.

More seeds: `python -m tests.disagg.simulation --seeds 0:1000 --jobs 2`.
"""

import pytest

from tests.disagg.simulation import Outcome, run_seed

PER_CHUNK = 12
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 100))]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_c22_c33_transfers_random_faults_each_ticket_ends_once_with_its_data_or_a_cause(chunk):
    outcomes = [run_seed(seed) for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)]
    outcome = sum(outcomes, Outcome(seeds=0))
    if chunk == 0:  # the traffic is of the kind that finds bugs; any twelve seeds need not be
        assert min(outcome.arrived, outcome.broken) >= outcome.offers // 5

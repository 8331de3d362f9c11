"""Random traffic against the reference, seed after seed. A failure's note has the line that replays it.

More seeds: `python -m tests.simulation.simulator --seeds 0:10000 --jobs 2`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulation.event_log import Outcome
from tests.simulation.simulator import main, run_seed

REPLAYED = 3
HASHED = (1, 3, 6, 8)  # seeds
QUICK = (0, 2, 5, 6, 8, 9, 11, 14, 17, 24, 35, 37, 40)  # each mutant that names the test fails with one of them
PER_CHUNK, ALL = 100, 10_000  # seeds of the long tier (B-1)
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, ALL, PER_CHUNK)]


@pytest.mark.long
@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_b1_b3_b7_c19_c27_every_request_ends_once_with_the_references_tokens(seeds: Sequence[int]) -> None:
    outcomes = [run_seed(seed) for seed in seeds]
    outcome = sum(outcomes, Outcome(seeds=0))
    share = len(seeds) / PER_CHUNK
    assert outcome.seeds == len(seeds)
    # The traffic must be of the kind that finds bugs: hits of every kind, retractions of either, and few refusals.
    assert outcome.hits >= 50 * share
    assert outcome.retractions >= 5 * share
    assert outcome.refused < outcome.requests / 3
    assert min(outcome.state_hits, outcome.window_hits, outcome.offloaded, outcome.evicted_states) >= 10 * share
    assert outcome.states_taken >= 200 * share
    assert outcome.drafted - 200 * share > outcome.accepted > 200 * share
    assert outcome.found > 2 * outcome.right > 10 * share  # n-grams guess right and wrong
    assert outcome.disturbed > 5 * share
    # B-7: a seed replays to the same event log, and no two whose engines did something have the same.
    digests = [outcome.digest for outcome in outcomes]
    busy = [outcome.digest for outcome in outcomes if outcome.steps]
    assert len(set(busy)) == len(busy) > 0.9 * len(seeds)
    assert [run_seed(seed).digest for seed in seeds[:REPLAYED]] == digests[:REPLAYED]


def test_b7_the_event_log_does_not_depend_on_pythons_hash_seed() -> None:
    code = f"from tests.simulation.simulator import run_seed; print(*(run_seed(s).digest for s in {HASHED}))"
    other = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    log = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    assert log.split() == [run_seed(seed).digest for seed in HASHED]


@pytest.mark.slow
def test_the_command_line_runs_a_range_and_replays_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "seeds 2" in told
    assert sum((run_seed(seed) for seed in (1, 0)), Outcome(seeds=0)).digest in told
    assert main(["--seed", "1"]) == 0
    assert run_seed(1).digest in capsys.readouterr().out

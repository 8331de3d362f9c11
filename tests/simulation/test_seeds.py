"""Random traffic against the reference, seed after seed. A failure's note has the line that replays it.

More seeds: `python -m tests.simulation.simulator --seeds 0:10000 --jobs 2`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.event_log import Outcome
from tests.simulation.simulator import main, run_seed

SEEDS_PER_CHUNK, REPLAYED = 100, 3
HASHED = 16  # seeds
QUICK, ALL = 1, 100  # chunks: what every run of the suite does, and what the long tier does (B-1)
SLOW = [pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(QUICK, ALL)]


@pytest.mark.long
@pytest.mark.parametrize("chunk", [*range(QUICK), *SLOW])
def test_b1_b3_b7_c19_c27_every_request_ends_once_with_the_references_tokens(chunk: int) -> None:
    outcomes = [run_seed(seed) for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK)]
    outcome = sum(outcomes, Outcome(seeds=0))
    assert outcome.seeds == SEEDS_PER_CHUNK
    # The traffic must be of the kind that finds bugs: hits of every kind, retractions of either, and few refusals.
    assert outcome.hits >= 50
    assert outcome.retractions >= 5
    assert outcome.refused < outcome.requests / 3
    assert min(outcome.state_hits, outcome.window_hits, outcome.offloaded, outcome.evicted_states) >= 10
    assert outcome.states_taken >= 200
    assert outcome.drafted - 200 > outcome.accepted > 200
    assert outcome.found > 2 * outcome.right > 10  # n-grams guess right and wrong
    assert outcome.disturbed > 5
    # B-7: a seed replays to the same event log, and no two whose engines did something have the same.
    digests = [outcome.digest for outcome in outcomes]
    busy = [outcome.digest for outcome in outcomes if outcome.steps]
    assert len(set(busy)) == len(busy) > 0.9 * SEEDS_PER_CHUNK
    assert [run_seed(chunk * SEEDS_PER_CHUNK + i).digest for i in range(REPLAYED)] == digests[:REPLAYED]


def test_b7_the_event_log_does_not_depend_on_pythons_hash_seed() -> None:
    code = f"from tests.simulation.simulator import run_seed; print(*(run_seed(s).digest for s in range({HASHED})))"
    other = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    log = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    assert log.split() == [run_seed(seed).digest for seed in range(HASHED)]


def test_the_command_line_runs_a_range_and_replays_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "seeds 2" in told
    assert sum((run_seed(seed) for seed in (1, 0)), Outcome(seeds=0)).digest in told
    assert main(["--seed", "1"]) == 0
    assert run_seed(1).digest in capsys.readouterr().out

"""Two schedulers and a wire that does what wires do, seed after seed (C2, C3, C8, C21, C22, C27). A failure's note has
the line that replays it.

More seeds: `python -m tests.simulation.pair --seeds 0:10000 --jobs 2`.
"""

from collections.abc import Sequence

import pytest

from tests.simulation.liveness import Violation
from tests.simulation.pair import Half, Pair, PairOutcome, main, random_pair_of, run_pair
from tests.simulation.pair_cause_mutations import CAUSES
from tests.simulation.pair_liveness import TICKS, TICKS_PER_TOKEN, Rooms
from tests.simulation.pair_mutations import MUTATIONS

QUICK = (3, 5, 6, 7)  # each mutant that names the test fails with one of them
PER_CHUNK, ALL = 20, 10_000  # seeds of the long tier
FOUND_BY = (0, 1, 3, 5, 6, 7, 14, 24, 30, 46, 76)
FOUND_AT = {  # looked at first
    "decode_ignores_that_its_lease_is_renewed": 3,
    "prefill_ignores_a_broken_transfer": 6,
    "what_was_offered_is_free_once_damaged_ledgers_are_cleared": 76,
}
SLOW = [pytest.param(range(first, first + PER_CHUNK), marks=pytest.mark.slow) for first in range(0, ALL, PER_CHUNK)]


@pytest.mark.long
@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_c22_both_halves_of_a_request_end_once_with_one_engines_tokens_or_a_typed_error(seeds: Sequence[int]) -> None:
    outcomes = [run_pair(seed) for seed in seeds]
    outcome = sum(outcomes, PairOutcome(seeds=0))
    # The traffic must be of the kind that finds bugs: much of it well, and much hurt.
    assert min(outcome.arrived, outcome.whole) >= outcome.pairs // 4
    assert min(outcome.arrived, outcome.hurt) >= 2 * len(seeds)
    assert run_pair(seeds[0]).digest == outcomes[0].digest


class _Timed(Half):
    """An engine that notes each value of its clock."""

    @property
    def now(self) -> float:
        return float(self.times[-1])

    @now.setter
    def now(self, seconds: float) -> None:
        self.times = [*vars(self).get("times", []), seconds]


def test_pair_clocks_of_both_engines_never_decrease() -> None:
    """Seed 653 failed because prefill heard an offer a second time at an earlier time than the first."""
    pair = random_pair_of(653, Pair[_Timed], _Timed)
    pair.run()
    for half in (pair.prefill, pair.decode):
        assert half.times == sorted(half.times)


@pytest.mark.slow
def test_the_command_line_replays_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2"]) == 0
    assert run_pair(2).digest in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str) -> None:
    seed = MUTATIONS.found_after(name, range(1500))
    assert seed is not None, f"no seed below 1500 fails although {name.replace('_', ' ')}"
    run_pair(seed)  # and the product itself passes that seed


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CAUSES)
def test_pair_simulator_failure_without_cause_or_progress_is_found(name: str) -> None:
    """C22, C27: in each run, each failure has a fault, a limit or an abort as its cause, and each room ends in time."""
    seed = CAUSES.found_after(name, [FOUND_AT.get(name, 0), *FOUND_BY])
    assert seed is not None, f"no seed of {FOUND_BY} fails although {name.replace('_', ' ')}"
    run_pair(seed)  # and the product itself passes that seed


def test_rooms_one_that_lives_too_long_is_found() -> None:
    rooms = Rooms(ticks_of_timeouts=7)
    rooms.begin(1, num_tokens=3)
    rooms.begin(2, num_tokens=5)
    most = TICKS + 7 + TICKS_PER_TOKEN * (3 + 5)
    for _ in range(most):
        rooms.tick({1, 2}, counts=True)
    rooms.tick({1, 2}, counts=False)
    with pytest.raises(Violation, match=f"after {most + 1} ticks, at most {most}"):
        rooms.tick({1}, counts=True)
    rooms.tick(set(), counts=True)

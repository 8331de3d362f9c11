"""Engines with exactly the fewest states and windows that their rows need (C4, C8, C22): what admission promised is
there whenever a step takes it, whatever other engines may still touch. `Oracles` compare the two for each kind."""

from collections.abc import Callable

import pytest

from forebay.memory.kinds.kind import Reserve
from forebay.memory.kinds.window import declaration
from forebay.memory.kinds.window.demand import window_reserve
from tests.simulation import adapting_pair, pair, simulator, sleeping, sleeping_pair
from tests.simulation.workload import least_pools

SIMULATORS: dict[str, tuple[Callable[[int], object], int]] = {
    "simulator": (simulator.run_seed, 4),
    "sleeping": (sleeping.run_seed, 4),
    "pair": (pair.run_pair, 2),
    "sleeping_pair": (sleeping_pair.run_seed, 2),
    "adapting_pair": (adapting_pair.run_seed, 2),
}


@pytest.mark.quick(2)
@pytest.mark.long
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 480))])
@pytest.mark.parametrize("name", SIMULATORS)
def test_c8_steps_take_what_was_promised_from_the_least_pools(name: str, chunk: int) -> None:
    run, count = SIMULATORS[name]
    with least_pools():
        for seed in range(30_000 + chunk * count, 30_000 + (chunk + 1) * count):
            run(seed)


@pytest.mark.slow
def test_a_kind_that_promises_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows less for each row than it may hold."""

    def too_little(*args: int, **others: int) -> Reserve:
        reserve = window_reserve(*args, **others)
        return reserve._replace(per_row=reserve.per_row - 3)

    monkeypatch.setattr(declaration, "window_reserve", too_little)
    with least_pools(), pytest.raises(Exception, match="rows took"):
        simulator.run_seeds(range(20, 200))

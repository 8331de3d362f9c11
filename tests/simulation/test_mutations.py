"""The simulator's own test: with a bug put into the product, a seed must fail soon.

All bugs from seed 0, with the score: `python -m tests.simulation.mutations`.
"""

import pytest

from tests.simulation.mutations import MUTATIONS, found_after
from tests.simulation.simulator import run_seed


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name):
    seed = found_after(name, range(300))
    assert seed is not None, f"no seed below 300 fails although {name.replace('_', ' ')}"
    run_seed(seed)  # and the product itself passes that seed

"""Pictures on a prefill and a decode engine under random traffic and faults (C21, C22, C34).

More seeds: `python -m tests.simulation.showing_pair --seeds 0:5000 --jobs 2`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forebay.scheduler import early_offers, matches, offers
from tests.simulation.showing_pair import ShowingPairOutcome, run_seed

QUICK = (0, 9, 10)
SLOW = [pytest.param(range(first, first + 20), marks=pytest.mark.slow) for first in range(0, 400, 20)]


@pytest.mark.parametrize("seeds", [QUICK, *SLOW], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_c34_pictures_of_a_pair_of_engines_give_the_tokens_of_each_request_alone(seeds: Sequence[int]) -> None:
    outcome = sum(map(run_seed, seeds), ShowingPairOutcome(seeds=0))
    assert min(outcome.shown, outcome.moved, outcome.whole) > 0
    assert len(seeds) < 20 or min(outcome.misled, outcome.encoded) > 0


def offers_without_pictures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offers, "pictures_of", lambda req: ())


def pictures_that_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matches, "pictures_of", Alike)


class Alike(tuple[bytes, ...]):
    """Digests that are equal to any others."""

    __slots__ = ()

    def __new__(cls, req: Any) -> Any:
        return super().__new__(cls, early_offers.pictures_of(req))

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = tuple.__hash__


@pytest.mark.parametrize("fault", [offers_without_pictures, pictures_that_are_not_compared])
def test_c34_mistakes_with_pictures_of_a_pair_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_seed(13)

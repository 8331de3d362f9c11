"""Takes every rule out in turn: its test must fail. All of them with the score: `python -m tests.mutants`."""

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant, Overlay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Overlay:
    return Overlay(tmp_path_factory.mktemp("mutants") / "overlay")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_without_its_rule_the_test_fails(mutant: Mutant, overlay: Overlay) -> None:
    assert overlay.finds(mutant), f"nothing noticed that this was taken out: {mutant.rule}"

"""Several values in one case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.together import together

ran: list[tuple[int, str]] = []


@pytest.mark.parametrize("parity", [0, 1])
@together("number, word", [(4, "four"), (5, "five"), (6, "six")])
def some(parity: int, number: int, word: str) -> None:
    ran.append((number, word))
    assert number % 2 == parity


def test_together_runs_all_values_and_reports_each_that_fails() -> None:
    ran.clear()
    with pytest.raises(ExceptionGroup, match="2 of 3 cases of some fail") as caught:
        some(parity=1)
    assert ran == [(4, "four"), (5, "five"), (6, "six")]
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["of {'number': 4, 'word': 'four'}"],
        ["of {'number': 6, 'word': 'six'}"],
    ]


@pytest.mark.parametrize("suffix", ["a", "b"])
@together("number", range(3))
def test_together_fixtures_and_parameters_are_given(number: int, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{number}{suffix}"
    path.touch()
    assert len(list(tmp_path.iterdir())) == number + 1

"""Which statements a mutant changes, and where an engine reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import reached
from tests.mutants.mutant import Mutant
from tests.mutants.reached import ALONE, Reached, changed_statements, probed

SOURCE = """\
LIMIT = 3

def first(values):
    if values:
        total = sum(values)
        return total
    return 0
"""


def mutant(old: str, new: str) -> Mutant:
    return Mutant("C1 a rule", "a.py", old, new, "a.py::test")


@pytest.mark.parametrize(
    ("old", "new", "places"),
    [
        ("LIMIT = 3", "LIMIT = 4", {None}),
        ("if values:", "if not values:", {4}),
        ("        total = sum(values)\n", "        total = max(values)\n", {5}),
        ("        return total\n", "", {6}),
        ("    return 0\n", "    return 0\n    raise\n", {7}),
        ("        total = sum(values)\n", "        total = sum(values)\n        total += 1\n", {5, 6}),
    ],
)
def test_changed_statements_are_the_innermost_ones_of_changed_lines(old: str, new: str, places: set[Any]) -> None:
    assert changed_statements(SOURCE, mutant(old, new)) - {None} == places - {None}
    assert (None in changed_statements(SOURCE, mutant(old, new))) == (None in places)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(reached.FOLDER, str(tmp_path))
    reached._hit.clear()
    yield tmp_path
    reached._hit.clear()


@pytest.mark.parametrize(("values", "hits"), [([1, 2], {"0", "1"}), ([], {"0", "2"})])
def test_probes_leave_a_file_for_each_statement_that_is_reached(
    folder: Path, values: list[int], hits: set[str]
) -> None:
    namespace: dict[str, Any] = {}
    exec(probed(SOURCE, {4: 0, 6: 1, 7: 2}), namespace)
    assert namespace["first"](values) == sum(values)
    assert {path.name for path in folder.iterdir()} == hits


def test_mutant_is_tried_only_where_a_changed_statement_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reached, "REPOSITORY", tmp_path)
    (tmp_path / "forebay").mkdir()
    (tmp_path / "forebay" / "a.py").write_text(SOURCE)
    lines = {ALONE: frozenset[tuple[str, int]](), "b": frozenset({("a.py", 4)}), "c": frozenset({("b.py", 6)})}
    Reached(["b", "c"], lines=lines).write(tmp_path / "kept" / "reached")
    found = Reached.read(tmp_path / "kept" / "reached")
    assert found.by(mutant("if values:", "if True:")) == {"b"}
    assert found.by(mutant("return total", "return 1")) == set()
    assert found.by(mutant("LIMIT = 3", "LIMIT = 4")) == {ALONE, "b", "c"}

"""How many tests of each folder may take more than a second in the short tier. The numbers only fall."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import LONG_S, MOST_LISTED, unmarked_long

TESTS = Path(__file__).parent
BUDGET = Counter(
    api=2, browser=3, cli=3, docs=2, engine=5, formats=4, gates=2, ops=1, route=1, runtime=3, scheduler=1,
    server=8, simulation=8,
)  # fmt: skip
REMEDY = (
    "make a test shorter, mark it slow, or raise the number with a decision record; lower a number that is too high"
)


def num_long(source: str) -> int:
    """Return how many functions of a module are marked `long`."""
    if "pytest.mark.long" not in source:
        return 0
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum("pytest.mark.long" in map(ast.unparse, function.decorator_list) for function in functions)


def test_long_tests_of_each_folder_are_as_many_as_its_budget() -> None:
    counts: Counter[str] = Counter()
    for path in TESTS.rglob("test_*.py"):
        counts["gates" if path.parent == TESTS else path.relative_to(TESTS).parts[0]] += num_long(path.read_text())
    assert +counts == BUDGET, REMEDY


def test_num_long_counts_marked_functions() -> None:
    assert num_long("@pytest.mark.long\ndef test_a(): ...\n@pytest.mark.slow\nasync def test_b(): ...") == 1


def report(name: str, duration_s: float, *marks: str, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(name, (name, 0, name), dict.fromkeys(marks, 1), "passed", None, when, duration=duration_s)  # type: ignore[arg-type]


def test_unmarked_long_adds_phases_and_names_the_slowest() -> None:
    reports = [report("a", 0.6 * LONG_S), report("b", 3.0, "long"), report("c", 3.0, "slow"), report("d", 2.0)]
    assert unmarked_long([*reports, report("a", 0.6 * LONG_S, when="setup")]) == ["   2.0 s  d", "   1.2 s  a"]
    assert len(unmarked_long(report(str(i), 2.0) for i in range(50))) == MOST_LISTED

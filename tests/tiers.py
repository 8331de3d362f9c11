"""Which cases of a test the short tier runs; `make test-all` runs all of them.

- Of a test with three parameters or more: cases in which every two values of two parameters meet, if they ever do.
- Of a test with `@pytest.mark.quick(8)`: at most eight.

A test of the short tier of which a case takes more than a second is marked `long`: `tests/test_long_cases.py` counts
them by folder. After a run those are listed that took as long and are not marked.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import pytest

from tests.pairs import covering

LONG_S: Final = 1.0
MOST_LISTED: Final = 20


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def sample(names: Sequence[str], most: int) -> set[str]:
    """Return at most `most` of the names, chosen by their digests.

    The same names are chosen in each run, of a grid of parameters not one row or column alone, and a new name replaces
    one at most.
    """
    return {*sorted(names, key=_digest)[:most]}


def mark_long_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases as slow that the short tier leaves out. Cases that are slow by themselves are not counted."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        kept = _kept(cases)
        for item in cases:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.slow)


def _kept(cases: list[pytest.Function]) -> set[str]:
    """Return the node ids of the cases of one test that the short tier runs."""
    if mark := cases[0].get_closest_marker("quick"):
        return sample([case.nodeid for case in cases], *mark.args)
    if len(cases[0].callspec.params) < 3:
        return {case.nodeid for case in cases}
    cases = sorted(cases, key=lambda case: _digest(case.nodeid))  # where several would do, not the first of each list
    return {cases[i].nodeid for i in covering([case.callspec.params for case in cases])}


def unmarked_long(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each of the slowest cases that took more than a second and are marked neither long nor slow."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if not {"long", "slow"} & report.keywords.keys():
            seconds[report.nodeid] += report.duration
    slowest = sorted(((took_s, name) for name, took_s in seconds.items() if took_s > LONG_S), reverse=True)
    return [f"{took_s:6.1f} s  {name}" for took_s, name in slowest[:MOST_LISTED]]

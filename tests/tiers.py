"""Which cases of a test the short tier runs; `make test-all` runs all of them.

- Of a test: at most three cases. Of one with three parameters or more, those that have most pairs of values.
- Of a test of the folders whose coverage only rises (memory, requests, scheduler): at most twelve.
- Of a test below `tests/ops` with three parameters or more: cases in which every two values of two parameters meet, if
  they ever do. A kernel has a variant for each instruction set, type and shape.
- Gates, tests with `@pytest.mark.whole` and those that a mutant names run each case, or those pairs.
- Of a test with `@pytest.mark.quick(8)`: at most eight.
- Of a test of hypothesis: 40 % of its examples, by default or by `examples`.
- Of each test of a file with `pytestmark = pytest.mark.quick(8)`: at most eight, and those pairs if they are fewer.

A case that a mutant names is among them in any event.

A test of the short tier of which a case takes more than a second is marked `long`: `tests/test_long_cases.py` counts
them by folder. After a run those are listed that took as long and are not marked.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

import pytest
from hypothesis import settings

from tests.mutants import MUTANTS
from tests.pairs import most_pairs

SHORT_TIER: Final = "not slow"  # of the option -m
SHORT_PERCENT: Final = 40  # of the examples of hypothesis, of which the long tier has 100 unless a test says otherwise
MOST: Final = 3  # cases of a test that says nothing else
MOST_OF_COVERED: Final = 12
COVERED: Final = "tests/memory/", "tests/requests/", "tests/scheduler/"
KERNELS: Final = "tests/ops/"
GATES: Final = "tests/test_", "tests/docs/"  # of the source and of the documents, each part of which counts
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


def examples(most: int) -> int:
    """Return how many examples a test has in this tier that has `most` in the long one."""
    return most * settings().max_examples // 100


def thin(metafunc: pytest.Metafunc, *, has_gpu: bool) -> None:
    """Mark the cases of a test as slow that the short tier leaves out, and make no items of slow cases in that tier,
    nor of cases for a GPU where none is.

    Cases that are slow by themselves are not counted. Half of all cases are slow, and an item costs more than its
    case. One item stays of a test of which none would.
    """
    cases, test = metafunc._calls, metafunc.definition
    if not test.get_closest_marker("slow"):
        quick = [case for case in cases if not _has(case, {"slow"})]
        first = test.nodeid
        names = [f"{first}[{case.id}]" for case in quick]
        kept = _kept(test, {name: case.params for name, case in zip(names, quick, strict=True)})
        for name, case in zip(names, quick, strict=True):
            if name not in kept:
                case.marks.append(pytest.mark.slow.mark)
        if metafunc.config.option.markexpr == SHORT_TIER:
            left_out = {"slow"} if has_gpu else {"slow", "gpu"}
            cases[:] = [case for case in cases if not _has(case, left_out)] or cases[:1]
    elif metafunc.config.option.markexpr == SHORT_TIER:
        del cases[1:]


def _has(case: Any, names: Set[str]) -> bool:
    return any(mark.name in names for mark in case.marks)


@functools.cache
def _named() -> frozenset[str]:
    """Return the node ids of the tests and the cases that mutants name."""
    return frozenset(f"tests/{mutant.test}" for mutant in MUTANTS)


def _kept(test: pytest.Item, cases: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Return the node ids of the cases of one test, given with their parameters, that the short tier runs."""
    named = _named()
    return _chosen(test, cases) | {name for name in cases if name in named}


def _chosen(test: pytest.Item, cases: Mapping[str, Mapping[str, object]]) -> set[str]:
    mark, is_whole = test.get_closest_marker("quick"), _is_whole(test)
    has_pairs = max(map(len, cases.values()), default=0) >= 3
    if mark in test.own_markers:
        return sample([*cases], mark.args[0])
    if is_whole and not has_pairs and not mark:
        return {*cases}
    names = sorted(cases, key=_digest)  # if several cover as much, not the first of each list
    order = most_pairs([cases[name] for name in names])
    if mark:
        return {names[i] for i in order} if len(order) <= mark.args[0] else {*names[: mark.args[0]]}
    has_all_pairs = is_whole or (has_pairs and test.nodeid.startswith(KERNELS))
    most = MOST_OF_COVERED if test.nodeid.startswith(COVERED) else MOST
    return {names[i] for i in (order if has_all_pairs else order[:most])}


def _is_whole(test: pytest.Item) -> bool:
    return bool(test.get_closest_marker("whole")) or test.nodeid.startswith(GATES) or test.nodeid in _named()


def unmarked_long(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each of the slowest cases that took more than a second and are marked neither long nor slow."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if not {"long", "slow"} & report.keywords.keys():
            seconds[report.nodeid] += report.duration
    slowest = sorted(((took_s, name) for name, took_s in seconds.items() if took_s > LONG_S), reverse=True)
    return [f"{took_s:6.1f} s  {name}" for took_s, name in slowest[:MOST_LISTED]]

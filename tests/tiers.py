"""The short tier takes some cases of a test that has many (`@pytest.mark.quick(8)`), `make test-all` all of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import pytest


def sample(names: Sequence[str], most: int) -> set[str]:
    """Return at most `most` of the names, chosen by their digests.

    The same names are chosen in each run, of a grid of parameters not one row or column alone, and a new name replaces
    one at most.
    """
    return {*sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:most]}


def mark_long_cases(items: Sequence[pytest.Item]) -> None:
    """Mark cases as slow that the short tier leaves out, of tests with a mark `quick(most)`.

    Cases that are slow by themselves are not counted.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("quick")
        assert mark is not None
        kept = sample([item.nodeid for item in cases], *mark.args)
        for item in cases:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.slow)

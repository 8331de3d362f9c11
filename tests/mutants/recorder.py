"""A plugin of pytest, for `covered.py`: coverage notes which test runs a line; seconds and failures are kept, too."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

_seconds: defaultdict[str, float] = defaultdict(float)
_failed: set[str] = set()
_current = ""


def _name(node_id: str) -> str:
    return node_id.partition("[")[0]


def _switch(context: str) -> None:
    coverage = Coverage.current()
    assert coverage is not None, "sitecustomize starts it"
    coverage.switch_context(context)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _current
    _current = _name(item.nodeid)
    _switch(_current)
    try:
        return (yield)
    finally:
        _switch("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """What a fixture of a module sets up, all tests of the file use."""
    if fixturedef.scope == "function":
        return (yield)
    _switch(_current.partition("::")[0])
    try:
        return (yield)
    finally:
        _switch(_current)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[_name(report.nodeid)] += report.duration
    if report.failed:
        _failed.add(_name(report.nodeid))


def pytest_sessionfinish() -> None:
    told = {"seconds": _seconds, "failed": sorted(_failed)}
    Path(os.environ["FOREBAY_TOLD"]).write_text(json.dumps(told))

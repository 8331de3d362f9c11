"""CPU seconds of each test, so that the suite is made shorter by its largest parts on a machine however busy.

    python -m pytest -p benchmarks.suite -n 2 --dist worksteal -m "not slow"
    python -m benchmarks.suite

The first appends a line for each test to `build/costs.tsv`: CPU seconds and node id. The second prints the sums by
folder, file and test function. Another file: `COSTS=FILE` before either command.

CPU seconds are those of the worker and of all processes that descend from it, from the start of a test's first fixture
to the end of its last. A process that forked engines counts for the test during which it computes. Lines in
parentheses are what no test does: imports and collection, and the end of a session.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

FILE: Final = Path(os.environ.get("COSTS", "build/costs.tsv")).absolute()  # a test may change the directory
MOST: Final = 60  # rows of each table
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def descendants_s() -> float:
    """Return the CPU seconds of processes that descend from this one, living or ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended_s = usage.ru_utime + usage.ru_stime
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none, as in most tests
        return ended_s
    children: dict[int, list[tuple[int, int]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append((int(stat.parent.name), sum(map(int, fields[11:15]))))
    ticks, parents = 0, [os.getpid()]
    while parents:
        for pid, spent in children.get(parents.pop(), ()):
            ticks += spent
            parents.append(pid)
    return ended_s + ticks / _TICKS


def _write(seconds: float, name: str) -> None:
    with FILE.open("a") as file:
        file.write(f"{seconds:.4f}\t{name}\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write the cost of a test with its fixtures."""
    others_s = descendants_s()
    started_s = time.process_time()
    try:
        return (yield)
    finally:
        own_s = time.process_time() - started_s
        _write(own_s + descendants_s() - others_s, item.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Write what a process costs before its first test."""
    FILE.parent.mkdir(exist_ok=True)
    started_s = time.process_time()
    _write(started_s, "(imports before collection)")
    try:
        return (yield)
    finally:
        _write(time.process_time() - started_s, "(collection)")


def main() -> None:
    """Print the sums of a run by folder, file and test function, largest first."""
    tables: list[Counter[str]] = [Counter(), Counter(), Counter()]
    cases: Counter[str] = Counter()
    for line in FILE.read_text().splitlines():
        seconds, _, name = line.partition("\t")
        function = name.partition("[")[0]
        file = function.partition("::")[0]
        parts = file.split("/")
        folder = "/".join(parts[:2]) if len(parts) > 2 else "gates" if len(parts) == 2 else file
        for table, key in zip(tables, (folder, file, function), strict=True):
            table[key] += float(seconds)  # type: ignore[assignment]  # Counter sums floats, too
            cases[key] += 1
    print(f"{sum(tables[0].values()):.0f} CPU s")
    for table in tables:
        print()
        for key, total_s in table.most_common(MOST):
            print(f"{total_s:8.1f} {cases[key]:6} {key}")


if __name__ == "__main__":
    main()

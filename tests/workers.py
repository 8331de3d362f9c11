"""Tests in several processes, which are forked once all tests are collected: `pytest --workers 3`.

A process of pytest-xdist imports and collects everything itself, and tells of each test three times; that takes an
eighth of the suite's time. Here a worker inherits what was collected. It takes a module at a time, so fixtures of a
module are made once. Modules with tests marked `long` come first: what runs last is short, and no worker idles long.

A process that has initialized CUDA cannot fork: tests for a GPU run with pytest-xdist (`benchmarks/gpu.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import selectors
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest

Group = range  # of places in the list of items
_IDLE: Final = "idle"  # beside reports
_DIED: Final = "died"
_ENDED: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="run modules in so many processes, forked after collection")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_workers = session.config.option.workers
    if num_workers < 2 or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own
    Workers(session).run(num_workers)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def grouped(items: Sequence[pytest.Item]) -> list[Group]:
    """Return the places of the items by module, those with most tests marked `long` first, then the longest.

    The gates, which are beside this file, are one group: they read the same syntax trees.
    """
    groups: list[Group] = []
    for _, members in itertools.groupby(range(len(items)), lambda place: _group(items[place].path)):
        places = [*members]
        groups.append(range(places[0], places[-1] + 1))
    return sorted(groups, key=lambda group: (-_num_long(items, group), -len(group)))


def _group(path: Path) -> Path:
    folder = Path(__file__).parent
    return folder if path.parent == folder else path


def _num_long(items: Sequence[pytest.Item], group: Group) -> int:
    return sum(items[place].get_closest_marker("long") is not None for place in group)


@dataclass
class Worker:
    """What the first process knows of a worker: `left` are the places of its module that it has not finished."""

    pid: int
    connection: Connection
    left: deque[int] = field(default_factory=deque)


class Workers:
    """Hands modules to workers, and passes their reports to the hooks of this process."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._todo = deque(grouped(session.items))
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count()
        self._finished: list[int] = []

    def run(self, num_workers: int) -> None:
        """Return once all tests have run; in each worker, once it has none left."""
        is_worker = False
        for _ in range(min(num_workers, len(self._todo))):
            is_worker = is_worker or self._start()
        while not is_worker and not self._stops() and self._running():
            for key, _ in self._selector.select():
                is_worker = is_worker or self._receive(key.data)
        if not is_worker:
            self._end()

    def _running(self) -> list[Worker]:
        return [key.data for key in self._selector.get_map().values()]

    def _stops(self) -> bool | str:
        return self._session.shouldfail or self._session.shouldstop

    def _start(self) -> bool:
        """Fork a worker. Returns True in the worker, after its last test."""
        ours, theirs = multiprocessing.Pipe()
        number = next(self._numbers)
        if pid := _fork():
            theirs.close()
            self._selector.register(ours, selectors.EVENT_READ, Worker(pid, ours))
            return False
        for connection in (ours, *(worker.connection for worker in self._running())):
            connection.close()
        self._selector.close()
        _be_worker(self._config, number)
        _work(self._session, theirs)
        return True

    def _receive(self, worker: Worker) -> bool:
        """Handle one message of a worker, or its end. Returns True in a worker that takes its place."""
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            message = _DIED
        if message == _DIED:
            return self._replace(worker)
        if message == _IDLE:
            self._give(worker)
            return False
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=message)
        self._pass_on(report)
        if report.when == "teardown":
            worker.left.popleft()
        return False

    def _pass_on(self, report: pytest.TestReport) -> None:
        about = {"nodeid": report.nodeid, "location": report.location}
        if report.when == "setup":
            self._config.hook.pytest_runtest_logstart(**about)
        self._config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            self._config.hook.pytest_runtest_logfinish(**about)

    def _give(self, worker: Worker) -> None:
        """Give a worker its next module, or an empty one, after which it ends."""
        group = self._todo.popleft() if self._todo else range(0)
        worker.connection.send(group)
        worker.left.extend(group)
        if not group:
            self._forget(worker)
            self._finished.append(worker.pid)

    def _forget(self, worker: Worker) -> None:
        self._selector.unregister(worker.connection)
        worker.connection.close()

    def _replace(self, worker: Worker) -> bool:
        """Report the test that ended its process, and start a worker for those that are left."""
        self._forget(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        assert worker.left, f"a worker ended before its first test, with exit code {code}"
        self._fail(self._session.items[worker.left.popleft()], f"the test ended its process, with exit code {code}")
        if worker.left:
            self._todo.appendleft(range(worker.left[0], worker.left[-1] + 1))
        return bool(self._todo) and self._start()

    def _fail(self, item: pytest.Item, cause: str) -> None:
        about: dict[str, Any] = {"nodeid": item.nodeid, "location": item.location}
        about["keywords"] = dict.fromkeys(item.keywords, 1)
        self._pass_on(pytest.TestReport(**about, outcome="passed", longrepr=None, when="setup"))
        self._pass_on(pytest.TestReport(**about, outcome="failed", longrepr=cause, when="call"))
        self._pass_on(pytest.TestReport(**about, outcome="passed", longrepr=None, when="teardown"))

    def _end(self) -> None:
        """Wait for the workers. One that still has tests notices that its connection is closed."""
        for worker in self._running():
            self._forget(worker)
            os.waitpid(worker.pid, 0)
        for pid in self._finished:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in _ENDED, f"a worker ended with exit code {code} after its last test"


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Libraries have threads that wait for work. They survive no fork, and start anew when there is some.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def _be_worker(config: Any, number: int) -> None:
    """Give this process files and a folder of its own, and take the output and the cache of results from it."""
    config.workerinput = {"workerid": f"gw{number}"}  # plugins know a worker of pytest-xdist by it
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders = config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / f"worker{number}"
    folders._basetemp.mkdir(mode=0o700)


class _Sender:
    """Sends reports to the first process, until that waits for none."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _work(session: pytest.Session, connection: Connection) -> None:
    """Run the modules that the first process gives. Return after the current test if that process ends or waits for no
    more, or if tests are to stop at a failure."""
    session.config.pluginmanager.register(_Sender(session.config, connection))
    # The next module is not known yet. In the place of its first item the session keeps its own fixtures alone.
    after_last: Any = session
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(_IDLE)
        while group := connection.recv():
            items = [session.items[place] for place in group]
            for item, following in zip(items, [*items[1:], after_last], strict=True):
                if session.shouldfail or connection.poll():
                    return
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(_IDLE)

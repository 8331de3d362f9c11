"""The processes of ranks: their start, their end with each other, and the lines of the log about it."""

from __future__ import annotations

import os
import queue
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from forebay.base.errors import EngineError
from forebay.config.resolve import resolve
from forebay.engine.ranks import processes
from forebay.engine.ranks.activity import Activity
from forebay.engine.ranks.log import Capture, LogWriter, Resume
from forebay.engine.ranks.outcome import DONE, RankLost
from forebay.engine.ranks.processes import EndingRunner, RankProcesses, end_process
from forebay.requests.step_plan import StepPlan
from tests.deadlines import HANGS_S
from tests.engine.ranks import standin
from tests.plans import changed
from tests.requests.test_step_plan import PLAN


class Lost(SystemExit):
    """Ends the thread that found it."""


@pytest.fixture(autouse=True)
def _threads_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    report = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda args: None if args.exc_type is Lost else report(args))


class Started:
    """Processes of ranks without a model, a log for them, and what they were lost by."""

    def __init__(self, size: int, stall_timeout: float, is_loaded: bool) -> None:
        config = resolve({"tp_size": size, "stall_timeout": stall_timeout, "dtype": "float32"}).engine
        self.lost: queue.SimpleQueue[EngineError] = queue.SimpleQueue()
        self.processes = RankProcesses(
            config, os.memfd_create("forebay-exchange"), entry=standin.ENTRY, on_lost=self._on_lost
        )
        if is_loaded:
            self.processes.loaded()
        self.log, self._num_sent = LogWriter(), 0

    def _on_lost(self, error: EngineError) -> NoReturn:
        self.lost.put(error)
        raise Lost

    def send(self, step: int = 1) -> int:
        """Send a step; return its number in the log."""
        self.processes.ring.send(self.log.record(changed(PLAN, step=step)))
        self._num_sent += 1
        return self._num_sent - 1

    def reason(self) -> str:
        return self.lost.get(timeout=HANGS_S).message


@contextmanager
def started(size: int, *, stall_timeout: float = 60.0, is_loaded: bool = True) -> Iterator[Started]:
    ranks = Started(size, stall_timeout, is_loaded)
    try:
        yield ranks
    finally:
        for child in ranks.processes.children:
            child.kill()
        ranks.processes.close()


def descriptors_of_ranks() -> list[str]:
    own = Path("/proc/self/fd")
    return [link for each in own.iterdir() if "memfd:forebay-" in (link := _link(each))]


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def test_ranks_execute_the_log_and_end_when_they_are_closed(capfd: pytest.CaptureFixture[str]) -> None:
    before = descriptors_of_ranks()
    with started(3) as ranks:
        numbers = [ranks.send(step) for step in (1, 2)]
        assert [ranks.processes.ring.outcomes(number) for number in numbers] == [[DONE, DONE]] * 2
        ranks.processes.close()
        assert [child.returncode for child in ranks.processes.children] == [0, 0]
    assert ranks.lost.empty()
    assert descriptors_of_ranks() == before
    ready = re.findall(r"rank_ready rank=(\d) weight_bytes=(\d+)", capfd.readouterr().err)
    assert sorted(ready) == [(str(rank), str(standin.WEIGHT_BYTES)) for rank in (1, 2)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("rank", [1, 2])
def test_rank_that_is_killed_is_lost_with_its_signal(rank: int) -> None:
    with started(3) as ranks:
        ranks.processes.ring.outcomes(ranks.send())
        os.kill(ranks.processes.children[rank - 1].pid, signal.SIGKILL)
        assert ranks.reason() == f"rank {rank} has ended: SIGKILL"


@pytest.mark.slow
def test_rank_that_is_stopped_is_lost_after_the_stall_timeout() -> None:
    with started(3, stall_timeout=1.0) as ranks:
        ranks.processes.ring.outcomes(ranks.send())
        os.kill(ranks.processes.children[1].pid, signal.SIGSTOP)
        ranks.send(2)
        assert re.fullmatch(r"ranks keep a log entry for \d+\.\d s, --stall-timeout is 1", ranks.reason())


@pytest.mark.parametrize("is_loaded", [False, True])
def test_rank_that_is_stopped_while_it_loads_or_sleeps_is_lost_after_the_stall_timeout(is_loaded: bool) -> None:
    with started(2, stall_timeout=1.0, is_loaded=is_loaded) as ranks:
        os.kill(ranks.processes.children[0].pid, signal.SIGSTOP)
        if is_loaded:
            ranks.processes.ring.send(ranks.log.record(Resume(tags=("weights",))), limited=False)
        what = "changes its memory" if is_loaded else "loads the model"
        found = rf"rank 1 {what}, and has used no CPU time for \d+\.\d s, --stall-timeout is 1"
        assert re.fullmatch(found, ranks.reason())


def test_rank_without_work_may_use_no_cpu_time() -> None:
    now, own = 0.0, os.getpid()
    activity = Activity([own, own], lambda: now)
    used: list[int | None] = [5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.engine.ranks.activity.cpu_ns", lambda process: used[0])
        assert activity.idle_s([1, 2]) == {1: 0.0, 2: 0.0}
        now = 3.0
        assert activity.idle_s([2]) == {2: 3.0}
        now = 7.0
        assert activity.idle_s([1, 2]) == {1: 0.0, 2: 7.0}
        used[0], now = 6, 8.0
        assert activity.idle_s([1, 2]) == {1: 0.0, 2: 0.0}
        used[0] = None
        now = 20.0
        assert activity.idle_s([1, 2]) == {1: 0.0, 2: 0.0}


@pytest.mark.slow
def test_rank_that_misses_an_entry_ends_and_reports_both_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    with started(2) as ranks:
        ranks.log.record(Capture())  # never sent
        ranks.send()
        assert ranks.reason() == "rank 1 has ended: exit code 1"
    ended = next(line for line in capfd.readouterr().err.splitlines() if "rank_ended" in line)
    assert 'reason="rank 1: log entry 1 arrived, entry 0 expected"' in ended


@pytest.mark.slow
def test_rank_on_which_a_step_fails_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with started(2) as ranks:
        number = ranks.send(standin.FAILS)
        assert ranks.processes.ring.outcomes(number)[0].error == "RuntimeError: no room"
        assert ranks.reason() == "rank 1 has ended: exit code 1"
    assert f"log entry {number} failed: RuntimeError: no room" in capfd.readouterr().err


def test_end_process_names_the_reason_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(processes.os, "_exit", codes.append)
    end_process(RankLost("rank 2 has ended: SIGKILL"))
    assert codes == [1]
    assert 'rank_lost reason="rank 2 has ended: SIGKILL" effect="all ranks end"' in caplog.text


class Broken:
    def launch(self, plan: StepPlan) -> NoReturn:
        raise RuntimeError("no room")

    def capture_next(self) -> NoReturn:
        raise RuntimeError("no graph")


def test_step_or_capture_that_fails_on_rank_0_ends_all_ranks() -> None:
    def lost(error: EngineError) -> NoReturn:
        raise error

    runner = EndingRunner(Broken(), lost)
    with pytest.raises(RankLost, match="rank 0: step 1 failed with RuntimeError: no room"):
        runner.launch(PLAN)
    with pytest.raises(RankLost, match="rank 0: a capture failed with RuntimeError: no graph"):
        runner.capture_next()

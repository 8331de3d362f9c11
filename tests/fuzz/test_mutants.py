"""What fuzzing forbids is counted for the input under test alone."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import pytest

from tests.deadlines import HANGS_S
from tests.fuzz.mutants import harmless


class _Cycle:
    """Garbage that only a collection finds, as a server of an earlier test may be."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, os.kill, os.getpid(), 0)


def test_harmless_an_opened_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="hostile input came as far as"), harmless():
        (tmp_path / "made").touch()


def test_harmless_garbage_of_an_earlier_test_is_not_collected() -> None:
    garbage = [_Cycle() for _ in range(10)]
    with harmless():
        del garbage
        kept = [[number] for number in range(100_000)]  # far above the collector's threshold
    assert len(kept) == 100_000


def test_harmless_another_thread_may_open_files(tmp_path: Path) -> None:
    def write() -> None:
        started.wait()
        (tmp_path / "made").touch()
        ended.set()

    started, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=write)
    thread.start()
    with harmless():
        started.set()
        assert ended.wait(HANGS_S)
    thread.join()

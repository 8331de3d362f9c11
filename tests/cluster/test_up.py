"""Progress of `forebay cluster up`."""

from __future__ import annotations

import threading

from forebay.cluster.up import progress_of
from tests.deadlines import HANGS_S


def test_progress_of_repeats_what_is_waited_for_and_ends_with_its_block() -> None:
    lines: list[str] = []
    several = threading.Event()

    def keep(line: str) -> None:
        lines.append(line)
        if len(lines) >= 2:
            several.set()

    before = threading.active_count()
    with progress_of("server-1 to be ready", keep, every_s=0.01):
        assert several.wait(HANGS_S)
    assert threading.active_count() == before
    assert all(line.startswith("still waiting for server-1 to be ready, ") for line in lines)


def test_progress_of_says_nothing_of_a_short_wait() -> None:
    lines: list[str] = []
    with progress_of("Ray to answer", lines.append):
        pass
    assert lines == []

"""Scorecard K-1, in seconds and in its full length."""

from __future__ import annotations

import logging
import time

import pytest

from tests.soak.soak import WARM_UP, Soak

FULL_S = 20 * 60
MAX_BYTES_PER_REQUEST = 1024
MAX_BLOCKS_PER_REQUEST = 0.5  # objects of Python's: half of one, where a single list that nobody empties makes one


def assert_nothing_grows(soak: Soak) -> None:
    """Between the end of the warm-up and the end."""
    rests = soak.rests[WARM_UP - 1 :]
    assert len({(rest.fds, rest.threads, rest.tasks) for rest in rests}) == 1, rests


def test_k1_traffic_of_all_kinds_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with Soak() as soak:
        for _ in range(WARM_UP + 1):
            soak.block(30)
        assert_nothing_grows(soak)
    counters = soak.engine.core.scheduler.counters
    assert soak.told.counts.keys() == {"whole", "stream", "given up", "bad", "broken off", "hit"}
    assert counters["retractions"] > 0
    assert counters["finished.abort"] > 0


@pytest.mark.slow
def test_k1_twenty_minutes_of_traffic_cost_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    until = time.monotonic() + FULL_S
    with Soak() as soak:
        while time.monotonic() < until or len(soak.rests) <= WARM_UP:
            soak.block(1000)
        assert_nothing_grows(soak)
    assert soak.growth(lambda rest: rest.rss) < MAX_BYTES_PER_REQUEST, soak.rests
    assert soak.growth(lambda rest: rest.blocks) < MAX_BLOCKS_PER_REQUEST, soak.rests

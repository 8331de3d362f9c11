"""Clocks that do not count the time in which nobody ran, by a time that the test makes."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from forebay.base.clock import MOST_S, RunClock
from forebay.base.loop_clock import LoopClock
from tests.deadlines import HANGS_S


class Time:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_while_the_ticks_come() -> None:
    time = Time()
    clock = RunClock(time)
    for _ in range(100):
        time.now += 1.0
        clock.tick()
    time.now += 0.5
    assert clock() == pytest.approx(100.5)


def test_of_time_without_a_tick_little_counts_whoever_asks_first() -> None:
    time = Time()
    clock = RunClock(time)
    time.now += 3600.0
    assert clock() == MOST_S
    clock.tick()
    assert clock() == MOST_S
    time.now += 1.0
    assert clock() == MOST_S + 1.0


def test_it_never_goes_back() -> None:
    time = Time()
    clock = RunClock(time)
    seen = 0.0
    for pause, ticks in [(0.3, True), (5.0, False), (0.1, True), (1.0, False), (0.0, True), (9.0, True)]:
        time.now += pause
        assert clock() >= seen
        if ticks:
            clock.tick()
        assert clock() >= seen
        seen = clock()


async def test_what_is_due_after_a_freeze_waits_for_the_rest_of_its_time() -> None:
    time, fired = Time(), []
    clock = LoopClock(time)
    timer = clock.call_later(0.05, lambda: fired.append("first"))
    clock.call_later(MOST_S + 0.05, lambda: fired.append("never")).cancel()
    await asyncio.sleep(0.1)
    assert fired == []  # the loop's own time has passed, this clock's has not
    time.now += 0.05
    while not fired:
        await asyncio.sleep(0.01)
    timer.cancel()
    assert fired == ["first"]


async def test_sleeping_by_a_clock_ends_when_it_has_counted_that_long() -> None:
    time = Time()
    clock = LoopClock(time)
    sleeping = asyncio.create_task(clock.sleep(0.02))
    await asyncio.sleep(0.1)
    assert not sleeping.done()
    time.now += 0.02
    await asyncio.wait_for(sleeping, HANGS_S)


async def test_a_clock_that_nobody_has_is_not_ticked_for_ever() -> None:
    """An event loop may see many engines come and go."""
    clock = LoopClock()
    gone = weakref.ref(clock)
    del clock
    gc.collect()
    assert gone() is None


async def test_the_loop_ticks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.base.loop_clock.TICK_S", 0.001)
    time = Time()
    clock = LoopClock(time)
    for passed in range(1, 4):
        time.now += MOST_S
        async with asyncio.timeout(HANGS_S):
            while clock._tick[1] < passed * MOST_S:
                await asyncio.sleep(0.001)
    assert clock() == 3 * MOST_S

"""A clock that an event loop ticks, and time-outs by it."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Final

from forebay.base.clock import TICK_S, RunClock

_EARLY_S: Final = 0.01  # event loops keep time in milliseconds


class LoopClock(RunClock):
    """Ticked by the running event loop while it has a user. A loop that was busy for a while has not read any messages
    meanwhile either."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        super().__init__(source)
        self._loop = asyncio.get_running_loop()
        _keep_ticking(weakref.ref(self), self._loop)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """As the loop's, in this clock's seconds."""
        return Timer(self, self._loop, seconds, callback)

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` of this clock; cancelling the task cancels the timer."""
        done: asyncio.Future[None] = self._loop.create_future()
        timer = self.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()


def _keep_ticking(wanted: weakref.ref[LoopClock], loop: asyncio.AbstractEventLoop) -> None:
    clock = wanted()
    if clock is not None:
        clock.tick()
        loop.call_later(TICK_S, _keep_ticking, wanted, loop)


class Timer:
    """A call that is due once its clock has counted the given seconds."""

    def __init__(
        self, clock: RunClock, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]
    ) -> None:
        self._clock, self._loop, self._callback = clock, loop, callback
        self._due = clock() + seconds
        self._handle = loop.call_later(seconds, self._fire)

    def _fire(self) -> None:
        left = self._due - self._clock()
        if left > _EARLY_S:
            self._handle = self._loop.call_later(left, self._fire)
        else:
            self._callback()

    def cancel(self) -> None:
        """Cancel the callback; no-op if it has run."""
        self._handle.cancel()

"""Time in which this process ran.

After a pause of a container, a move of a virtual machine or a stopped process, `time.monotonic` has counted the pause,
and every time-out seems to have passed. Code that measures a peer's silence or a request without progress uses one of
these clocks instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

TICK_S: Final = 1.0
MOST_S: Final = 2.0  # counted from one tick to the next, however late it comes


class RunClock:
    """Seconds, of which at most `MOST_S` are counted from one `tick` to the next. `tick` is called about every
    `TICK_S`, by a thread that does nothing else or by an event loop: a late call means that the process did not run.
    Any thread may read."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._tick = source(), 0.0  # when, and what was counted until then: one value, so that no reader sees a half

    def __call__(self) -> float:
        at, counted = self._tick
        return counted + min(self._source() - at, MOST_S)

    def tick(self) -> None:
        """Count the time since the last tick, at most `MOST_S` of it: a longer gap means that the process was
        suspended."""
        now = self._source()
        at, counted = self._tick
        self._tick = now, counted + min(now - at, MOST_S)

"""The one deadline of the suite: who meets it hangs.

Nothing in a test is ever late, it only never comes: the machine may be ten times slower than yours and busy with other
things. How fast something is, is measured by `make bench-limits`.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable

HANGS_S = 180.0
NEVER_S = 3600.0  # for what must be cut short, or must not be what cuts something short
POLL_S = 0.005
RENEWED_S = 60.0


def wait_until(condition: Callable[[], bool], told: Callable[[], str] = str) -> None:
    """Return when it is true; fails where it never becomes so, with what is `told` then."""
    end = time.monotonic() + HANGS_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"still not so after {HANGS_S:.0f} s {told()}")
        time.sleep(POLL_S)


class Watchdog:
    """Print the stacks of all threads if a test takes longer than its limit, at most `RENEWED_S` after the limit.

    To arm the interpreter's timer, the calling thread waits until the timer's last thread has ended: milliseconds on a
    busy machine, for each test. So the timer stays armed from test to test, and is armed anew once in `RENEWED_S`.
    """

    def __init__(self) -> None:
        self._limit_s = self._renew_at = 0.0

    def begin(self, limit_s: float) -> None:
        """Start the limit of one test."""
        now = time.monotonic()
        if limit_s != self._limit_s or now >= self._renew_at:
            faulthandler.dump_traceback_later(limit_s + RENEWED_S)
            self._limit_s, self._renew_at = limit_s, now + RENEWED_S

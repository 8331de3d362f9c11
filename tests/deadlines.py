"""The one deadline of the suite: who meets it hangs.

Nothing in a test is ever late, it only never comes: the machine may be ten times slower than yours and busy with other
things. How fast something is, is measured by `make bench-limits`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANGS_S = 180.0
NEVER_S = 3600.0  # for what must be cut short, or must not be what cuts something short
POLL_S = 0.005


def wait_until(condition: Callable[[], bool], told: Callable[[], str] = str) -> None:
    """Return when it is true; fails where it never becomes so, with what is `told` then."""
    end = time.monotonic() + HANGS_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"still not so after {HANGS_S:.0f} s {told()}")
        time.sleep(POLL_S)

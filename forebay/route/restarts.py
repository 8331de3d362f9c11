"""When a server process that has ended is started again, by a fleet or by an actor of a cluster."""

from __future__ import annotations

from typing import Final

END_GRACE_S: Final = 5.0  # between SIGTERM and SIGKILL
LONG_LIFE_S: Final = 10.0  # a process that has run for so long is started again at once
LONGEST_WAIT_S: Final = 10.0  # before a restart of one that has not

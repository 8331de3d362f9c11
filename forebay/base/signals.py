"""Signals that would end a process that does nothing about them."""

from __future__ import annotations

import signal
from typing import Final

DRAIN: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # let what runs come to its end
AT_ONCE: Final = (  # say so to those who wait, and end
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGIO,
    *((signal.SIGPWR,) if hasattr(signal, "SIGPWR") else ()),
)
ENDING: Final = (*DRAIN, *AT_ONCE)

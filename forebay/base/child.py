"""How processes of ours are started: without our keys, deaf to what a terminal or a supervisor sends to all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from typing import Final

from forebay.base.cpu import CPU_VARIABLE, this_cpu
from forebay.base.fault import FAULT_VARIABLES
from forebay.base.package import ROOT

_KEPT: Final = (CPU_VARIABLE, *FAULT_VARIABLES)


@contextlib.contextmanager
def held_back(*signals: signal.Signals) -> Iterator[None]:
    """A child started in here is born with them blocked. It ignores them later, but not before Python has started in
    it: a Ctrl-C at that moment reaches every process of a terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def environment() -> dict[str, str]:
    """Ours without FOREBAY_* (keys may be among them, and a child reads none), able to import this package. What says
    which CPU is simulated stays, for our kernels and for torch's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_") or k in _KEPT}
    kept |= this_cpu().library_limits
    inherited = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)
    return kept


def process_has_ended(process: int) -> bool:
    """Return whether the last thread of a process has ended; `process` is a descriptor of `os.pidfd_open`."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))

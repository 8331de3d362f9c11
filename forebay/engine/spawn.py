"""The engine process's birth, before anybody knows what it will serve: it imports torch while the parent still reads
its configuration. So nothing that takes time to import is imported here."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import forebay
from forebay.base.fault import FAULT_VARIABLES

ENTRY: Sequence[str] = ("-P", "-m", "forebay.engine.process")

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that waits for its `Configure`, and our end of its channel. Whoever holds it owns both, until
    `launch.configure` takes it."""

    child: subprocess.Popen[bytes]
    sock: socket.socket

    def discard(self) -> None:
        """End it; nothing if it has ended."""
        self.sock.close()
        self.child.kill()
        self.child.wait()


def spawn(entry: Sequence[str] = ENTRY) -> Spawned:
    """Start the process. `entry` is what the interpreter is given to run (tests have an engine of their own)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, _held_back(signal.SIGINT, signal.SIGTERM):
        child = subprocess.Popen(
            [sys.executable, *entry, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            env=_environment(),
            pass_fds=[theirs.fileno()],
        )
    return Spawned(child, ours)


@contextlib.contextmanager
def _held_back(*signals: signal.Signals) -> Iterator[None]:
    """A child started in here is born with them blocked: it ignores them later, but Python would not until then, and a
    Ctrl-C at that moment goes to all of a terminal's processes."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """Ours without FOREBAY_* (keys may be among them, and an engine reads none), able to import this package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_") or k in FAULT_VARIABLES}
    root = str(Path(forebay.__file__).parent.parent)
    inherited = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else root
    return kept

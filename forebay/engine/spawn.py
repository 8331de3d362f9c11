"""The engine process's birth, before anybody knows what it will serve: it imports torch while the parent still reads
its configuration. So nothing that takes time to import is imported here."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import forebay
from forebay.base.fault import FAULT_VARIABLES
from forebay.base.signals import ENDING

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
    """Start the process. `entry` is what the interpreter is given to run (tests have an engine of their own). Its
    arguments are its end of the channel and the process it must not outlive; 0 where the kernel, which counts the death
    of the starting thread as the death of the parent, could not see to that."""
    lasting = threading.current_thread() is threading.main_thread()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, _held_back(*ENDING):
        child = subprocess.Popen(
            [sys.executable, *entry, str(theirs.fileno()), str(os.getpid() if lasting else 0)],
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

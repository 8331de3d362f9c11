"""The start of the engine process, before its configuration is known: it imports torch while the parent still reads the
configuration. So this module imports nothing that takes time."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.base import child

ENTRY: Sequence[str] = ("-P", "-m", "forebay.engine.loop.process")

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that waits for its `Configure`, and our end of its channel. The holder owns both, until
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
    with theirs:
        arguments = [*entry, str(theirs.fileno()), str(os.getpid() if lasting else 0)]
        return Spawned(child.start(arguments, descriptors=[theirs.fileno()], stdout=_STDERR, label="engine"), ours)

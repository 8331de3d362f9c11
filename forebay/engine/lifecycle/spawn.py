"""The start of the engine process, before its configuration is known: it imports torch while the parent still reads the
configuration. So this module imports nothing that takes time."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

from forebay.base import child
from forebay.base.record_buffer import shared_memory

ENTRY: Sequence[str] = ("-P", "-m", "forebay.engine.loop.process")

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that waits for its `Configure`, our end of its channel, and memory that both share. The holder owns
    them, until `launch.configure` takes them."""

    child: subprocess.Popen[bytes]
    sock: socket.socket
    memory: FileIO | None = None

    def discard(self) -> None:
        """End it; nothing if it has ended."""
        self.sock.close()
        if self.memory is not None:
            self.memory.close()
        self.child.kill()
        self.child.wait()


def spawn(entry: Sequence[str] = ENTRY) -> Spawned:
    """Start the process. `entry` is what the interpreter is given to run (tests have an engine of their own). Its
    arguments are its end of the channel, memory for its flight recorder (-1: none), and the process it must not
    outlive; 0 where the kernel, which counts the death of the starting thread as the death of the parent, could not see
    to that."""
    lasting = threading.current_thread() is threading.main_thread()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    memory = shared_memory("forebay-recorder")
    with theirs:
        descriptors = [theirs.fileno(), *([memory.fileno()] if memory else [])]
        numbers = (theirs.fileno(), memory.fileno() if memory else -1, os.getpid() if lasting else 0)
        arguments = [*entry, *map(str, numbers)]
        process = child.start(arguments, descriptors=descriptors, stdout=_STDERR, label="engine")
        return Spawned(process, ours, memory)

"""Starting, watching and reaping the engine process. No torch, so that the parent can start it at once and import its
own heavy modules while the engine imports its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

from forebay.base.record_buffer import RecordBuffer
from forebay.config.engine_config import EngineConfig
from forebay.engine.channel import FrameEncoder
from forebay.engine.frames import Configure
from forebay.engine.lifecycle.spawn import ENTRY, Spawned, spawn


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A started engine and our end of its channel. Owns both; `stop` gives them back. `records` is its flight recorder,
    which outlives it."""

    child: subprocess.Popen[bytes]
    sock: socket.socket
    encoder: FrameEncoder  # of our direction: its sequence goes on after `Configure`
    config: EngineConfig
    records: RecordBuffer | None = None

    @property
    def pid(self) -> int:
        return self.child.pid

    def stop(self, grace_s: float) -> int:
        """Close the channel, which the engine takes as its end; kill it after `grace_s`; reap it. Idempotent."""
        self.sock.close()
        try:
            return self.child.wait(grace_s)
        except subprocess.TimeoutExpired:
            # SIGTERM would say nothing new: the engine leaves terminal and service-manager signals to its parent.
            self.child.kill()
            return self.child.wait()


def launch(config: EngineConfig, *, entry: Sequence[str] = ENTRY) -> EngineProcess:
    """Start the engine and return without waiting for it; its `Ready` or its last words come over the channel."""
    return configure(spawn(entry), config)


def configure(spawned: Spawned, config: EngineConfig) -> EngineProcess:
    """Send its configuration to a process that was started ahead, and own the process from here on. The configuration
    travels over the channel: neither arguments nor environment show it."""
    buffer = _buffer(spawned.memory, config.recorder.flight_recorder)
    encoder = FrameEncoder()
    frame = Configure(config)
    with contextlib.suppress(OSError):  # it is dead already, which end-of-file will tell with the exit code at hand
        spawned.sock.sendall(encoder.encode(frame))
    return EngineProcess(spawned.child, spawned.sock, encoder, config, buffer)


def _buffer(memory: FileIO | None, num_bytes: int) -> RecordBuffer | None:
    """Make a buffer in memory that the engine shares, None if none is asked for, and close it. The size of the memory
    tells the engine whether there is one."""
    if memory is None:
        return None
    with memory:
        return RecordBuffer.of(memory.fileno(), num_bytes) if num_bytes else None


def describe_exit(code: int | None) -> str:
    """An exit code (None: there is none yet; negative: a signal's number) in words, with the usual cause."""
    if code is None:
        return "closed its channel"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system's out-of-memory killer, most often)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"

"""Starting, watching and reaping the engine process. No torch, so that whoever starts it can do so at once and import
its own heavy things while the engine imports its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import forebay
from forebay.base.fault import FAULT_VARIABLES
from forebay.config.engine_config import EngineConfig
from forebay.engine.channel import FrameEncoder
from forebay.engine.frames import Configure

ENTRY: Sequence[str] = ("-P", "-m", "forebay.engine.process")

_STDERR = 2


class EngineProcess:
    """A started engine and our end of its channel. Owns both; `stop` gives them back."""

    def __init__(
        self, child: subprocess.Popen[bytes], sock: socket.socket, encoder: FrameEncoder, config: EngineConfig
    ):
        self.config = config
        self.sock = sock
        self.encoder = encoder  # of our direction: its sequence goes on after `Configure`
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for the number of the signal that killed it."""
        return self._child.poll()

    def stop(self, grace_s: float) -> int:
        """Close the channel, which the engine takes as its end; kill it after `grace_s`; reap it. Idempotent."""
        self.sock.close()
        try:
            return self._child.wait(grace_s)
        except subprocess.TimeoutExpired:
            # SIGTERM would say nothing new: the engine leaves terminal and service-manager signals to its parent.
            self._child.kill()
            return self._child.wait()


def launch(config: EngineConfig, *, entry: Sequence[str] = ENTRY) -> EngineProcess:
    """Start the engine and return without waiting for it; its `Ready` or its last words come over the channel.

    `entry` is what the interpreter is given to run (tests have an engine of their own). The configuration travels over
    the channel: nothing of it is seen in the arguments or the environment.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, _held_back(signal.SIGINT, signal.SIGTERM):
        child = subprocess.Popen(
            [sys.executable, *entry, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            env=_environment(),
            pass_fds=[theirs.fileno()],
        )
    encoder = FrameEncoder()
    # The kernel counts the death of the starting thread as the death of the parent.
    lasting = threading.current_thread() is threading.main_thread()
    configure = Configure(config=config, parent_pid=os.getpid(), die_with_parent=lasting)
    with contextlib.suppress(OSError):  # it is dead already, which end-of-file will tell with the exit code at hand
        ours.sendall(encoder.encode(configure))
    return EngineProcess(child, ours, encoder, config)


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


def describe_exit(code: int | None) -> str:
    """`exit_code` in words, with the usual cause where there is one."""
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

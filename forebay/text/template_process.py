"""The process that a chat template runs in, from outside."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Final

from forebay.base.child import environment, held_back
from forebay.base.errors import Unavailable
from forebay.base.signals import ENDING
from forebay.text.template_frames import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    Answer,
    Failed,
    decode_answer,
    receive_answer,
    send,
)

_ENTRY: Final = ("-P", "-m", "forebay.text.template_worker")
_END_S: Final = 1.0


class TemplateProcess:
    """One that has just been started. Whoever holds it calls `end`."""

    def __init__(self) -> None:
        """Raises Unavailable where no process can be started."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, held_back(*ENDING):
                self._child = subprocess.Popen(
                    [sys.executable, *_ENTRY, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment(),
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            self._sock.close()
            raise Unavailable(f"the chat template's process cannot be started ({error.strerror})") from error

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def ask(self, question: bytes, timeout_s: float) -> Answer:
        """The answer to an encoded question; a `Failed` of ours where there is none. The process has then ended."""
        try:
            self._sock.settimeout(timeout_s)
            send(self._sock, question)
            content = receive_answer(self._sock, timeout_s)
        except TimeoutError:
            self.end()
            return Failed(f"gave no answer in {timeout_s:g} s")
        except OSError:
            content = None
        return decode_answer(content) if content is not None else self._obituary()

    def end(self) -> None:
        """Nothing if it has ended."""
        self._sock.close()
        self._child.kill()
        self._child.wait()

    def _obituary(self) -> Failed:
        try:
            status = self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            status = None
        self.end()
        if status == -signal.SIGPROF:
            return Failed(f"took longer than {MAX_CPU_S:g} s")
        return Failed(f"needed more than {MAX_MEMORY_BYTES >> 20} MiB, or crashed (exit status {status})")

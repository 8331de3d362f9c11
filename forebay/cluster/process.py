"""The child process of an actor: started on a socket that the actor keeps, logged, and ended with the actor."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from forebay.base import child
from forebay.base.paths import cache_folder
from forebay.base.trust import private_folder
from forebay.cluster.messages import LogPart, LogRequest
from forebay.cluster.surroundings import Surroundings

ENTRY: Final = ("-P", "-m", "forebay.cluster.member")
MAX_LOG_BYTES: Final = 64 << 20


def log_folder() -> Path:
    """Return the folder of the logs of this user's servers on this node. It is created. Raises ConfigError if others
    could write it."""
    return private_folder(private_folder(cache_folder("cluster")) / "logs")


class Log:
    """A file to which processes append. Above `MAX_LOG_BYTES` it is moved to `NAME.log.1`."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self) -> int:
        """Return a descriptor to append to."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def trim(self) -> None:
        """Empty the file if it is too long. Its writers keep their descriptors."""
        if self.path.exists() and self.path.stat().st_size > self._max_bytes:
            shutil.copy(self.path, self.path.with_suffix(".log.1"))
            os.truncate(self.path, 0)

    def read(self, request: LogRequest) -> LogPart:
        """Return a part of the file. An offset behind its end is that of a file that was emptied since."""
        if not self.path.exists():
            return LogPart(text=b"", next_offset=0)
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            offset = max(0, size + request.offset) if request.offset < 0 else request.offset
            file.seek(offset if offset <= size else 0)
            text = file.read(request.max_bytes)
            return LogPart(text=text, next_offset=file.tell())

    def last_lines(self, count: int) -> str:
        """Return the last lines, or what their last 64 KiB have of them."""
        text = self.read(LogRequest(offset=-(64 << 10))).text.decode(errors="replace")
        return "\n".join(text.splitlines()[-count:])


class Child:
    """One process of an actor at a time. The pipe ends the process with the actor, whatever ends that."""

    def __init__(self, kind: str, words: Sequence[str], sock: socket.socket, log: Log) -> None:
        self._kind, self._words, self._sock, self._log = kind, words, sock, log
        self._lease = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self, surroundings: Surroundings, environment: Mapping[str, str]) -> None:
        """Start the process. The one before must have ended."""
        listening, lease = self._sock.fileno(), self._lease[0]
        settings = surroundings.as_text()
        output = self._log.open()
        try:
            self._process = child.start(
                [*ENTRY, self._kind, settings, str(listening), str(lease), *self._words],
                descriptors=[listening, lease],
                stdout=output,
                stderr=subprocess.STDOUT,
                variables=environment,
                own_session=True,
            )
        finally:
            os.close(output)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, or None if the process has not ended within `timeout_s`."""
        assert self._process is not None, "there is no process yet"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`. Return when the process has ended."""
        if self._process is not None:
            child.end([self._process], grace_s)

    def close(self) -> None:
        """Close the pipe, which ends a process that still runs."""
        for descriptor in self._lease:
            os.close(descriptor)

"""One writer of standard error for a tree of processes whose log is JSON: every line that a process, its children or a
library in C writes becomes an object.

The first process puts a pipe in the place of its descriptors 1 and 2, and gives each child one of its own. A thread
reads them: objects pass, other text becomes the event `output`. What arrives together is one object, so that a
traceback is one. The pipes end here, so that what a child wrote before it crashed is written, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import ClassVar, Final, TextIO

from forebay.base.json_lines import as_line, is_object, rfc3339

_STDOUT: Final = 1
_STDERR: Final = 2
_READ: Final = 1 << 16
_QUIET_MS: Final = 50  # text that pauses for that long is complete
_LONGEST: Final = 1 << 16  # bytes of one text
_LEVELS: Final = {b"forebay: error: ": ("error", "error"), b"forebay: note: ": ("info", "note")}
_MORE, _END = b"+", b"-"


class Relay:
    """Owns descriptors 1 and 2 and a thread from `start` until `close`. `stream` is for this process's own log: its
    lines do not wait for the thread."""

    running: ClassVar[Relay | None] = None

    def __init__(self, process: str) -> None:
        self._process = process
        self._stdout, self._out = os.dup(_STDOUT), os.dup(_STDERR)
        self._writing = threading.Lock()
        self._new: SimpleQueue[tuple[int, _Source]] = SimpleQueue()
        self._woken, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._work, name="log-relay", daemon=True)
        self.stream: TextIO = _Lines(self)

    def start(self) -> None:
        """Take over standard output and standard error."""
        own = self.open(self._process)
        for stream, descriptor in ((sys.stdout, _STDOUT), (sys.stderr, _STDERR)):
            stream.flush()
            os.dup2(own, descriptor)
        os.close(own)
        self._thread.start()
        Relay.running = self

    def close(self) -> None:
        """Give standard output and standard error back, and write what has arrived."""
        Relay.running = None
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._stdout, _STDOUT)
        os.dup2(self._out, _STDERR)
        os.write(self._waker, _END)
        self._thread.join()
        for descriptor in (self._stdout, self._out, self._woken, self._waker):
            os.close(descriptor)

    def open(self, process: str) -> int:
        """Return the descriptor to which `process` writes; the caller closes it. It is read until every copy is
        closed."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._new.put((read, _Source(process, self)))
        os.write(self._waker, _MORE)
        return write

    def write(self, lines: bytes) -> None:
        """Write whole lines. A device that does not take them loses them."""
        with self._writing, contextlib.suppress(OSError):
            while lines:
                lines = lines[os.write(self._out, lines) :]

    def _work(self) -> None:
        sources: dict[int, _Source] = {}
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        ends = False
        while not ends:
            waits = any(source.is_incomplete for source in sources.values())
            ready = {descriptor for descriptor, _ in poll.poll(_QUIET_MS if waits else None)}
            if self._woken in ready:
                ends = _END in os.read(self._woken, _READ)
                self._add(sources, poll)
            for descriptor in sources.keys() & (sources if ends else ready):
                sources[descriptor].read(descriptor)
            for source in sources.values() if ends or not ready else ():
                source.flush()
            self._drop_ended(sources, poll)
        for descriptor in sources:
            os.close(descriptor)

    @staticmethod
    def _drop_ended(sources: dict[int, _Source], poll: select.poll) -> None:
        for descriptor in [descriptor for descriptor, source in sources.items() if source.ended]:
            poll.unregister(descriptor)
            os.close(descriptor)
            sources.pop(descriptor).flush()

    def _add(self, sources: dict[int, _Source], poll: select.poll) -> None:
        with contextlib.suppress(Empty):
            while True:
                descriptor, source = self._new.get_nowait()
                sources[descriptor] = source
                poll.register(descriptor, select.POLLIN)


class _Source:
    """The bytes of one pipe that are not written yet: a `begun` line, and the `text` of lines that are no objects."""

    def __init__(self, process: str, relay: Relay) -> None:
        self._process = process
        self._relay = relay
        self._begun = b""
        self._text = b""
        self.ended = False

    @property
    def is_incomplete(self) -> bool:
        """Return whether something waits for more."""
        return bool(self._begun or self._text)

    def read(self, descriptor: int) -> None:
        """Take what has arrived."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, _READ):
                *lines, self._begun = (self._begun + data).split(b"\n")
                for line in lines:
                    self._line(line)
                if len(self._begun) > _LONGEST:
                    self.flush()
            self.ended = True

    def flush(self) -> None:
        """Write what waits for more."""
        begun, self._begun = self._begun, b""
        self._line(begun)
        self._flush_text()

    def _line(self, line: bytes) -> None:
        if is_object(line):
            self._flush_text()
            self._relay.write(line + b"\n")
        elif line.strip():
            is_whole = line.startswith(tuple(_LEVELS))
            if is_whole:
                self._flush_text()
            self._text += line + b"\n"
            if is_whole or len(self._text) > _LONGEST:
                self._flush_text()

    def _flush_text(self) -> None:
        text, self._text = self._text.rstrip(), b""
        if not text:
            return
        level, name = "warning", "output"
        for start, (found_level, found_name) in _LEVELS.items():
            if text.startswith(start):
                text, level, name = text.removeprefix(start), found_level, found_name
        fields = {"ts": rfc3339(time.time()), "level": level, "process": self._process, "event": name}
        self._relay.write(as_line({**fields, "text": text.decode(errors="replace")}).encode() + b"\n")


class _Lines(io.StringIO):
    """Passes whole lines on."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def write(self, text: str) -> int:
        self._relay.write(text.encode("ascii", "backslashreplace"))
        return len(text)


@contextlib.contextmanager
def relaying(process: str) -> Iterator[None]:
    """Run a relay while the block runs."""
    relay = Relay(process)
    relay.start()
    try:
        yield
    finally:
        relay.close()


def _forget() -> None:
    """Forget the relay, in a forked child: its thread is the parent's, which reads what the child writes."""
    Relay.running = None


os.register_at_fork(after_in_child=_forget)

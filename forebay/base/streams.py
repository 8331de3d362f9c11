"""The standard streams of a process whose parent closed them, or whose device is full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Final, TextIO

_FIRST_FREE: Final = 3


def open_standard_streams() -> None:
    """Open the null device for each closed standard stream, and make standard error lossy instead of fatal.

    Without this the next file or socket that is opened gets descriptor 0, 1 or 2, and a child process aborts.
    """
    for descriptor in range(_FIRST_FREE):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            assert opened == descriptor, f"descriptor {opened} was free below {descriptor}"
            os.set_inheritable(descriptor, True)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):  # a test may have its own
        sys.stderr = _lossy(sys.stderr)


def give_up_stdout() -> None:
    """Send standard output to the null device from now on, with the text that its buffer still has."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class _Lossy(io.FileIO):
    """Loses text that its device does not take: an error about standard error can be written nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _lossy(stream: io.TextIOWrapper) -> TextIO:
    stream.flush()
    raw = _Lossy(stream.fileno(), "w", closefd=False)
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, stream.encoding, "backslashreplace", line_buffering=True, write_through=True)

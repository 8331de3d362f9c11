"""One thread tells another that there is something to do."""

from __future__ import annotations

import os
from contextlib import suppress


class Wake:
    """Readable from `set` until `clear`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        with suppress(BlockingIOError):  # full: it is readable
            os.write(self._write, b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

"""One thread tells another that there is something to do."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Wake:
    """Readable from `set` until `clear`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock, self._is_closed = threading.Lock(), False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        """Nothing where it is closed: the number may be another file's by then."""
        with self._lock, suppress(BlockingIOError):  # full: it is readable
            if not self._is_closed:
                os.write(self._write, b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._read)
            os.close(self._write)

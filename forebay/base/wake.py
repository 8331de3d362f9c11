"""One thread tells another that there is something to do."""

from __future__ import annotations

import os
import threading


class Wake:
    """Readable from `set` until `clear`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock, self._is_closed, self._is_set = threading.Lock(), False, False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        """Nothing where it is closed: the number may be another file's by then."""
        with self._lock:
            if not self._is_closed and not self._is_set:
                self._is_set = True
                os.write(self._write, b"\0")

    def clear(self) -> None:
        with self._lock:
            if self._is_set:
                self._is_set = False
                os.read(self._read, 1)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._read)
            os.close(self._write)

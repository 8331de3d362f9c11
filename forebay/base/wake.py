"""One thread wakes another: a signal, and a queue with a signal."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Wake:
    """Readable from `set` until `clear`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock, self._is_closed, self._is_set = threading.Lock(), False, False

    def fileno(self) -> int:
        """Return the descriptor that is readable while the wake is set, for select."""
        return self._read

    def set(self) -> None:
        """Do nothing if it is closed: the number may be another file's by then."""
        with self._lock:
            if not self._is_closed and not self._is_set:
                self._is_set = True
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Reset the wake, before its reader looks for work."""
        with self._lock:
            if self._is_set:
                self._is_set = False
                os.read(self._read, 1)

    def close(self) -> None:
        """Close both descriptors; a `set` that comes later does nothing."""
        with self._lock:
            self._is_closed = True
            os.close(self._read)
            os.close(self._write)


class WakingQueue(Generic[T]):
    """Items from one thread to another; readable while there is one. `clock` has seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._wake = clock, Wake()
        self.items: deque[T] = deque()
        self._oldest: float | None = None

    def fileno(self) -> int:
        """Return the descriptor that is readable while items wait, for select."""
        return self._wake.fileno()

    def put(self, item: T) -> None:
        """Append an item and wake the reader. The time of the oldest item that waits is kept."""
        self.items.append(item)
        if self._oldest is None:
            self._oldest = self._clock()
        self._wake.set()

    def take(self) -> list[T]:
        """Return all items, oldest first."""
        self._wake.clear()
        self._oldest = None
        found = []
        while self.items:
            found.append(self.items.popleft())
        return found

    @property
    def untaken_s(self) -> float:
        """Seconds since the oldest item was put; 0 without items."""
        since = self._oldest
        return 0.0 if since is None else self._clock() - since

    def wake(self) -> None:
        """Make the queue readable although no item was put."""
        self._wake.set()

    def close(self) -> None:
        """Close the wake's descriptors; items can no longer wake the reader."""
        self._wake.close()

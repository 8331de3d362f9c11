"""The CPU time of ranks' processes: a rank that loads or sleeps has no time limit, but it must not stand still."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path


class Activity:
    """Measures how long processes have used no CPU time. `processes` are their ids, of ranks 1 and up. One thread calls
    it, several times within the time that matters."""

    def __init__(self, processes: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._processes, self._clock = processes, clock
        self._seen: dict[int, tuple[int | None, float]] = {}  # by rank that works: CPU time, and since when

    def idle_s(self, working: Collection[int]) -> dict[int, float]:
        """Return for each rank that is `working` the seconds since it used CPU time or began to work; 0 if the kernel
        does not count CPU time."""
        now, seen = self._clock(), {}
        for rank in working:
            used = cpu_ns(self._processes[rank - 1])
            before, since = self._seen.get(rank, (None, now))
            seen[rank] = used, since if used is not None and used == before else now
        self._seen = seen
        return {rank: now - since for rank, (_, since) in seen.items()}


def cpu_ns(process: int) -> int | None:
    """Return the CPU time of the threads of a process in nanoseconds; None if the kernel does not tell."""
    try:
        threads = Path(f"/proc/{process}/task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[0]) for each in threads)
    except (OSError, ValueError, IndexError):
        return None

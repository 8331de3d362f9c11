"""Cores of this node that one server has for itself. Ray sets no affinity: two servers would use all cores each.

No process divides the cores. Each server locks a file for each of its cores, and the kernel unlocks them when the
process that holds them ends, whatever ends it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from forebay.base.topology import Topology
from forebay.base.trust import private_folder


def lock_folder() -> Path:
    """Return the folder of this user's locks, the same for all network namespaces of the machine. It is created.
    Raises ConfigError if others could write it."""
    return private_folder(private_folder(Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}") / "cores")


class Cores:
    """The cores of one server, its own until `release` or the end of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: dict[int, int] = {}

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(self._locks))

    def take(self, count: int, topology: Topology) -> tuple[int, ...]:
        """Take `count` cores, all of one NUMA node if one has enough. Return none if there are not enough."""
        nodes = sorted(topology.nodes, key=len)
        for cpus in (*nodes, [cpu for node in nodes for cpu in node]):
            if self._take_of(cpus, count):
                return self.cpus
        return ()

    def release(self) -> None:
        """Give all cores back."""
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _take_of(self, cpus: Iterable[int], count: int) -> bool:
        for cpu in cpus:
            if len(self._locks) == count:
                break
            lock = os.open(self._folder / str(cpu), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                self._locks[cpu] = lock
        if len(self._locks) < count:
            self.release()
        return bool(self._locks)

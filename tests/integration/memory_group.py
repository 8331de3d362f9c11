"""A control group with a limit on memory, for processes of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.config.machine import CGROUP
from tests.deadlines import wait_until


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Its folder, and the names that its version of cgroups has for what tests read."""

    folder: Path
    limit: str
    events: str
    anonymous: str

    @property
    def joining(self) -> list[str]:
        """Words before a command, which then begins inside the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    @property
    def num_oom_kills(self) -> int:
        return _fields(self.folder / self.events)["oom_kill"]

    @property
    def anonymous_bytes(self) -> int:
        return _fields(self.folder / "memory.stat")[self.anonymous]


@contextmanager
def memory_group(num_bytes: int) -> Iterator[MemoryGroup]:
    """A group inside our own, which is removed when its processes have ended. Skips the test where none can be made."""
    group = _group()
    try:
        group.folder.mkdir()
        (group.folder / group.limit).write_text(str(num_bytes))
    except OSError as error:
        if group.folder.is_dir():
            group.folder.rmdir()
        pytest.skip(f"no control group with a limit on memory can be made here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group.folder / "cgroup.procs").read_text())
        group.folder.rmdir()


def _group() -> MemoryGroup:
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError as error:
        pytest.skip(f"there are no control groups: {error}")
    name = f"forebay-test-{os.getpid()}"
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            folder = CGROUP / "memory" / path.lstrip("/") / name
            return MemoryGroup(folder, "memory.limit_in_bytes", "memory.oom_control", "rss")
    path = next(path for number, _, path in lines if number == "0")
    return MemoryGroup(CGROUP / path.lstrip("/") / name, "memory.max", "memory.events", "anon")


def _fields(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}

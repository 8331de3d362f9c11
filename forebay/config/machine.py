"""What this machine offers: cores, memory, instruction sets. Containers' limits count."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Amount:
    """A quantity and where it comes from, for the reasons that people read."""

    value: int
    why: str


def usable_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> Amount:
    """Cores this process may use: its affinity, cut to the cgroup's quota."""
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        affinity = os.cpu_count() or 1
    quota = _cgroup_cores(cgroup, proc)
    if quota is not None and quota < affinity:
        return Amount(max(1, int(quota)), f"the container may use {quota:g} of {affinity} cores")
    return Amount(affinity, f"{affinity} usable core{'s' * (affinity > 1)}")


def available_memory(cgroup: Path = CGROUP, proc: Path = PROC) -> Amount:
    """Bytes that could be allocated now without swapping: the machine's, cut to what the cgroup leaves."""
    available = _meminfo(proc).get("MemAvailable")
    if available is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Amount(total // 2, "half of the machine's memory")
    left = _cgroup_memory_left(cgroup, proc)
    if left is not None and left < available:
        return Amount(left, "left under the container's limit")
    return Amount(available, "available")


def total_memory(proc: Path = PROC) -> int:
    return _meminfo(proc).get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@lru_cache
def cpu_flags(proc: Path = PROC) -> frozenset[str]:
    """The CPU's instruction sets by the kernel's names; empty where it does not tell."""
    try:
        with (proc / "cpuinfo").open() as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def cpu_model(proc: Path = PROC) -> str:
    try:
        with (proc / "cpuinfo").open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def _meminfo(proc: Path) -> dict[str, int]:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in fields if rest.strip()}


def _cgroup_folder(cgroup: Path, proc: Path, controller: str) -> Path | None:
    """Our folder under version 2 (`0::/path`) or, for `controller`, under version 1."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    unified = None
    for line in lines:
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            return _existing(cgroup / controller, path)
        if number == "0":
            unified = path
    return _existing(cgroup, unified) if unified is not None else None


def _existing(root: Path, path: str) -> Path:
    """Inside a container the path is often the host's, and the files lie at the root."""
    folder = root / path.lstrip("/")
    return folder if folder.is_dir() else root


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _cgroup_cores(cgroup: Path, proc: Path) -> float | None:
    folder = _cgroup_folder(cgroup, proc, "cpu")
    if folder is None:
        return None
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota_us = _read_number(folder / "cpu.cfs_quota_us")
        period_us = _read_number(folder / "cpu.cfs_period_us")
        return quota_us / period_us if quota_us and quota_us > 0 and period_us else None
    return int(quota) / int(period) if quota != "max" else None


def _cgroup_memory_left(cgroup: Path, proc: Path) -> int | None:
    """The limit less what is in use and cannot be dropped (page cache of inactive files can)."""
    folder = _cgroup_folder(cgroup, proc, "memory")
    if folder is None:
        return None
    limit = _read_number(folder / "memory.max")
    used = _read_number(folder / "memory.current")
    if limit is None:
        limit = _read_number(folder / "memory.limit_in_bytes")
        used = _read_number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return max(0, limit - used + _inactive_file(folder))


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))

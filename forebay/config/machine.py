"""Resources of this machine: cores, memory, instruction sets. Containers' limits count."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.base.cpu import PROC
from forebay.base.topology import usable_cpus
from forebay.base.units import human_bytes

CGROUP: Final = Path("/sys/fs/cgroup")
# What an engine maps before its weights: 780 MiB with two threads, and 72 MiB for each more (stack and malloc's arena).
ENGINE_BYTES: Final = 1 << 30

_CGROUP_LIMITS: Final = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),  # above it the kernel slows the process down to nothing
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
)

RLimits = Callable[[int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Amount:
    """A quantity with its source, for the reasons in the report."""

    value: int
    why: str


def warn_of_threads(num_threads: int, cores: Amount, warn: Callable[[str], None]) -> None:
    """Warn if more threads than cores shall compute."""
    if num_threads > cores.value:
        warn(
            f"--num-threads {num_threads} is more than the {cores.value} cores here ({cores.why}): threads that share "
            "a core wait for each other"
        )


def usable_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> Amount:
    """Cores this process may use: its affinity, cut to the cgroup's quota."""
    affinity = len(usable_cpus())
    quota = _cgroup_cores(cgroup, proc)
    if quota is not None and quota < affinity:
        return Amount(max(1, int(quota)), f"the container may use {quota:g} of {affinity} cores")
    return Amount(affinity, f"{affinity} usable core{'s' * (affinity > 1)}")


def available_memory(cgroup: Path = CGROUP, proc: Path = PROC, rlimits: RLimits = resource.getrlimit) -> Amount:
    """Bytes that the engine could allocate now without swapping: the machine's, cut to what each limit leaves."""
    available = meminfo(proc).get("MemAvailable")
    if available is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        here = Amount(total // 2, "half of the machine's memory")
    else:
        here = Amount(available, "available")
    amounts = [here, *_left_by_cgroups(cgroup, proc), *_left_by_rlimits(rlimits)]
    return min(amounts, key=lambda amount: amount.value)


def disk_of(folder: Path) -> Amount:
    """Bytes of the file system that holds `folder`, or would if it were created; 0 if that cannot be found out."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    try:
        return Amount(shutil.disk_usage(there or "/").total, f"the disk of {folder}")
    except OSError as error:
        return Amount(0, f"the disk of {folder}, which cannot be read ({error})")


def total_memory(proc: Path = PROC) -> int:
    """Return the bytes of physical memory, whatever a container's limit is."""
    return meminfo(proc).get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_model(proc: Path = PROC) -> str:
    """Return the model name from /proc/cpuinfo, or "unknown"."""
    try:
        with (proc / "cpuinfo").open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def meminfo(proc: Path) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty if it cannot be read."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {name: int(size.split()[0]) * 1024 for name, _, size in fields if size.strip()}


def _cgroup_folders(cgroup: Path, proc: Path, controller: str) -> list[Path]:
    """Our group under version 2 (`0::/path`) or, for `controller`, under version 1, and all groups around it: the
    limits of each count. Inside a container the path is often the host's, and only the last of them exists."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: tuple[Path, str] | None = None
    for line in lines:
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            found = cgroup / controller, path
            break
        if number == "0":
            found = cgroup, path
    if found is None:
        return []
    root, path = found
    inner = root / path.lstrip("/")
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir()]


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _cgroup_cores(cgroup: Path, proc: Path) -> float | None:
    quotas = [_cores_of(folder) for folder in _cgroup_folders(cgroup, proc, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cores_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota_us = _read_number(folder / "cpu.cfs_quota_us")
        period_us = _read_number(folder / "cpu.cfs_period_us")
        return quota_us / period_us if quota_us and quota_us > 0 and period_us else None
    return int(quota) / int(period) if quota != "max" else None


def _left_by_cgroups(cgroup: Path, proc: Path) -> Iterator[Amount]:
    """Return each limit minus the memory in use that cannot be dropped (page cache of inactive files can)."""
    for folder in _cgroup_folders(cgroup, proc, "memory"):
        stat = _memory_stat(folder)
        inactive = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        limits = [(name, _read_number(folder / name), _read_number(folder / used)) for name, used in _CGROUP_LIMITS]
        # Version 1: the strictest limit of all groups around this one, which a container's mount does not show.
        around = stat.get("hierarchical_memory_limit")
        limits.append(("hierarchical_memory_limit", around, _read_number(folder / "memory.usage_in_bytes")))
        for name, limit, used in limits:
            if limit is not None and used is not None:
                left = max(0, limit - used + inactive)
                yield Amount(left, f"left under the container's limit ({name} of {human_bytes(limit)})")


def _left_by_rlimits(rlimits: RLimits) -> Iterator[Amount]:
    for which, name in ((resource.RLIMIT_AS, "address space (ulimit -v)"), (resource.RLIMIT_DATA, "data (ulimit -d)")):
        limit = rlimits(which)[0]
        if limit != resource.RLIM_INFINITY:
            yield Amount(
                max(0, limit - ENGINE_BYTES), f"left for the engine by the limit of {human_bytes(limit)} on {name}"
            )


def _memory_stat(folder: Path) -> dict[str, int]:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}

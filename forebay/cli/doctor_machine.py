"""Properties of this machine that slow an engine down, for `forebay doctor`, and the remedies."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np

from forebay.base.cpu import CPU_VARIABLE, PROC, Cpu, this_cpu
from forebay.base.units import human_bytes
from forebay.base.variants import family
from forebay.config import machine
from forebay.config.gpu import gpu_memory

SYS: Final = Path("/sys")
MIN_MEMORY_BYTES: Final = 2 << 30
SWAPPED_BYTES: Final = 256 << 20  # less is what a kernel puts there of processes that sleep
SLOW_MEMORY_GB_S: Final = 12.0  # of a laptop's one channel
READ_BYTES: Final = 512 << 20  # beyond most caches
WATCHED_S: Final = 0.3
BUSY_SHARE: Final = 0.1  # of the cores, for others, before it shows in tokens per second
_CUDA: Final = re.compile(r"^cuda\b[^=]*= *'", re.MULTILINE)
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = ("0x0300", "0x0302")  # VGA and 3D controllers


class Verdict(StrEnum):
    """Severity of a finding; only PROBLEM changes the exit code."""

    OK = "ok"
    NOTE = "note"  # works, but not as well as it could
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `fix` says what to do, "" if nothing."""

    subject: str
    verdict: Verdict
    what: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the fields for --json."""
        return asdict(self)


def examine_machine() -> Iterator[Finding]:
    """Yield the findings about CPU, memory and GPU."""
    checks: tuple[Callable[[], Finding], ...] = (_cpu, cores, load, bandwidth, memory, swap, large_pages, gpu)
    for check in checks:
        yield check()


def _cpu() -> Finding:
    return cpu_finding(this_cpu())


def cpu_finding(cpu: Cpu) -> Finding:
    """Check which kernel variants the CPU runs, and name the instruction sets that it lacks."""
    names = ", ".join(variant.name for variant in cpu.variants)
    if cpu.simulated:
        what = f"{CPU_VARIABLE}={cpu.simulated} simulates one that runs {names or 'no native kernels'}"
        return Finding("CPU", Verdict.NOTE, what, f"unset {CPU_VARIABLE}")
    found = f"{machine.cpu_model()}; runs {names or 'no native kernels'}"
    if not names:
        return Finding("CPU", Verdict.NOTE, found, "the native kernels need x86-64 with AVX2 or aarch64; torch is used")
    missing = cpu.lacks
    # What the best variant adds is in few CPUs: that it is not there is no news.
    plain = family(cpu.flags)[1].needs <= cpu.flags
    fix = "" if plain else "--quantization int4, or int8 with --activation-bits 8, gains most where these are not"
    return Finding("CPU", Verdict.OK if plain else Verdict.NOTE, f"{found}; {missing}" if missing else found, fix)


def cores(cgroup: Path = machine.CGROUP, proc: Path = PROC) -> Finding:
    """Check whether a container or an affinity mask takes cores away."""
    usable, there = machine.usable_cores(cgroup, proc), os.cpu_count() or 1
    if usable.value < there:
        fix = "a container's limit (docker --cpus, resources.limits.cpu), taskset or a slice: raise it"
        return Finding("cores", Verdict.NOTE, f"{usable.value} of the machine's {there}: {usable.why}", fix)
    return Finding("cores", Verdict.OK, usable.why)


def load(proc: Path = PROC, wait: Callable[[float], None] = time.sleep) -> Finding:
    """Return the share of the cores that other processes take while this one waits."""
    count = machine.usable_cores(proc=proc).value
    before, started = _cpu_seconds(proc), time.monotonic()
    wait(WATCHED_S)
    seconds, after = time.monotonic() - started, _cpu_seconds(proc)
    taken = {key: spent - before[key] for key, spent in after.items() if key in before and spent > before[key]}
    share = sum(taken.values()) / seconds / count
    found = f"other programs take {min(share, 1):.0%} of {count} cores; load {os.getloadavg()[0]:.1f}"
    if share <= BUSY_SHARE:
        return Finding("load", Verdict.OK, found)
    most = ", ".join(f"{name} ({pid})" for pid, name in sorted(taken, key=lambda key: -taken[key])[:3])
    return Finding("load", Verdict.NOTE, f"{found}: {most}", "end them, or give --num-threads what they leave")


def _cpu_seconds(proc: Path) -> dict[tuple[str, str], float]:
    """By process and name, of all but ours."""
    found = {}
    for stat in proc.glob("[0-9]*/stat"):
        if stat.parent.name == str(os.getpid()):
            continue
        try:
            name, _, numbers = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        fields = numbers.split()
        found[stat.parent.name, name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def bandwidth(read: Callable[[], float] | None = None) -> Finding:
    """One stream reads all weights for every token: how often they can be read bounds it."""
    count = machine.usable_cores().value
    found = (read or (lambda: read_gb_s(count)))()
    times = found * 1e9 / (4 << 30)
    what = f"{found:.0f} GB/s read by {count} threads: 4 GiB of weights at most {times:.1f} times a second"
    if found < SLOW_MEMORY_GB_S:
        fix = "--quantization int4 reads least; a second memory module doubles a laptop's; look at the load above"
        return Finding("bandwidth", Verdict.NOTE, what, fix)
    return Finding("bandwidth", Verdict.OK, what)


def read_gb_s(threads: int) -> float:
    """Return the best of five readings of half a GiB, or of less if less memory is free."""
    size = max(1 << 20, min(READ_BYTES, machine.available_memory().value // 8) // threads // 8 * 8)
    parts = [np.ones(size // 8, np.int64) for _ in range(threads)]
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        readers = [threading.Thread(target=part.max, daemon=True) for part in parts]  # numpy lets others run meanwhile
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        seconds.append(time.perf_counter() - started)
    return threads * size / min(seconds) / 1e9


def memory() -> Finding:
    """Check the available memory against `MIN_MEMORY_BYTES`, container limits included."""
    there, total = machine.available_memory(), machine.total_memory()
    found = f"{human_bytes(there.value)} {there.why}, of {human_bytes(total)}"
    if there.value < MIN_MEMORY_BYTES:
        return Finding("memory", Verdict.NOTE, found, "end other programs, or give a small --kv-cache-bytes")
    if "limit" in there.why:
        fix = "a container's limit (docker --memory, resources.limits.memory) or ulimit: raise it for larger models"
        return Finding("memory", Verdict.NOTE, found, fix)
    return Finding("memory", Verdict.OK, found)


def swap(proc: Path = PROC) -> Finding:
    """Check whether more than `SWAPPED_BYTES` are swapped out."""
    fields = machine.meminfo(proc)
    total, free = fields.get("SwapTotal", 0), fields.get("SwapFree", 0)
    found = f"{human_bytes(total - free)} of {human_bytes(total)} used" if total else "none"
    if total - free > SWAPPED_BYTES:
        fix = "end other programs: weights or caches that are swapped out take a thousand times as long to read"
        return Finding("swap", Verdict.NOTE, found, fix)
    return Finding("swap", Verdict.OK, found)


def large_pages(root: Path = SYS) -> Finding:
    """Check large pages: if the kernel gives them, one thread reads weights in two thirds of the time."""
    path = root / "kernel/mm/transparent_hugepage/enabled"
    try:
        text = path.read_text()
    except OSError:
        return Finding("large pages", Verdict.OK, "this kernel tells nothing of them")
    if "[never]" in text:
        fix = f"echo madvise | sudo tee {path}"
        return Finding("large pages", Verdict.NOTE, "off: weights take half as long again to read", fix)
    return Finding("large pages", Verdict.OK, text.partition("[")[2].partition("]")[0])


def gpu(root: Path = SYS, torch_has_cuda: Callable[[], bool] | None = None) -> Finding:
    """Check that an NVIDIA GPU on the PCI bus has a driver, and that torch's build can use it."""
    there = sum(_read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)
                for device in root.glob("bus/pci/devices/*"))  # fmt: skip
    memory = gpu_memory()
    if memory is None and there:
        what = f"{there} of NVIDIA, without a driver that answers"
        return Finding("GPU", Verdict.NOTE, what, "install NVIDIA's driver (Debian: nvidia-driver), then `nvidia-smi`")
    if memory is None:
        return Finding("GPU", Verdict.OK, "none of NVIDIA; models compute on the CPU")
    found = f"{human_bytes(memory.free)} of {human_bytes(memory.total)} free"
    if not (torch_has_cuda or has_cuda)():
        fix = f"{sys.executable} -m pip install --force-reinstall torch, whose usual build on Linux has CUDA"
        return Finding("GPU", Verdict.NOTE, f"{found}, and torch's build has no CUDA", fix)
    return Finding("GPU", Verdict.OK, f"{found}: --device cuda computes there")


def has_cuda() -> bool:
    """Return whether torch's build has CUDA, by the files beside it: importing it takes a second."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and bool(_CUDA.search(_read(Path(spec.origin or "").parent / "version.py")))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""What a benchmark ran on and of what: facts for the record, and a line of them for people."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


def facts() -> dict[str, str | int]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }


def caption(repeats: int, kernels: str, *, quick: bool) -> str:
    kind = "a quick run, whose figures say nothing" if quick else f"medians of {repeats} runs"
    cores = len(os.sched_getaffinity(0))
    return f"{time.strftime('%d %B %Y')}, {cores} cores of {cpu()}, {kernels} kernels, commit {commit()}, {kind}."


def commit() -> str:
    """Of this checkout, with a `+` where files differ from it; empty outside of one."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=8", "--match="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def cpu() -> str:
    """Its name, and which of the instructions that count it has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(named.get("flags", "").split())
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    best = next((title for flag, title in known.items() if flag in flags), "")
    return f"{named.get('model name', platform.machine())}{f' ({best})' if best else ''}"

"""What the kernel says about this process, which the server under test is a thread of."""

from __future__ import annotations

import os
from pathlib import Path

MIB = 1 << 20


def rss_bytes() -> int:
    return _status("VmRSS")


def peak_rss_bytes() -> int:
    """The highest RSS since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

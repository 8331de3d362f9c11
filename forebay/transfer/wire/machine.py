"""The identity of the machine, as far as processes can share memory and descriptors there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from forebay.base.cpu import PROC


def gpu_of(device: torch.device) -> str:
    """Return the identity of a GPU, which has other numbers in other processes; "" for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def machine(proc: Path = PROC, *, gpu: str = "") -> str:
    """Return an id that two processes share if they belong to one user and can exchange descriptors and process
    numbers. Their caches are then on the host, or on the same `gpu`.

    Without /proc the value is another one at each call: it equals no peer's, and caches travel over TCP.
    """
    try:
        spaces = ":".join(os.readlink(proc / "self" / "ns" / name) for name in ("pid", "net"))
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)
    return ":".join([boot, str(os.getuid()), spaces, *([gpu] if gpu else [])])

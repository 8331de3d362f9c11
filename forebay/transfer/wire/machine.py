"""The identity of the machine, as far as processes can share memory and descriptors there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from forebay.base.cpu import PROC


def machine(proc: Path = PROC) -> str:
    """Return an id that two processes share if they belong to one user and can exchange descriptors and process
    numbers.

    Without /proc the value is another one at each call: it equals no peer's, and caches travel over TCP.
    """
    try:
        spaces = ":".join(os.readlink(proc / "self" / "ns" / name) for name in ("pid", "net"))
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(16)
    return f"{boot}:{os.getuid()}:{spaces}"

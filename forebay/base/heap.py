"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

_trim: Callable[[int], int] | None = None  # elsewhere than on glibc
with contextlib.suppress(OSError, AttributeError):
    _trim = ctypes.CDLL(None).malloc_trim  # looked up once: what requests bring makes us load nothing


def give_back_freed_memory() -> None:
    """To the system, every whole page of it; elsewhere than on glibc nothing is done. Takes milliseconds, and whoever
    needs as much again has it mapped anew."""
    if _trim is not None:
        _trim(0)

"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_freed_memory() -> None:
    """To the system, every whole page of it; elsewhere than on glibc nothing is done. Takes milliseconds, and whoever
    needs as much again has it mapped anew."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

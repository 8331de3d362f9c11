"""Memory for packed weights, in large pages where the system has them.

A step reads all weights, one after the other. In pages of 4 KiB a core then waits for the look-up of each, and what it
fetches ahead by itself ends with the page: one thread took 3.0 ms for the layers of a 135M model in 4 bits, now 2.0.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = 32 << 20  # bytes: weights lie together, as most are smaller than a large page
LINE: Final = 64  # bytes: a group's codes would otherwise straddle one line more


class WeightMemory:
    """Hands out bytes that begin on a cache line; a chunk is given back when nobody has anything of it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` bytes, not initialized."""
        if size > len(self._chunk):
            self._chunk = _mapped(max(size, _CHUNK))
        taken, self._chunk = self._chunk[:size], self._chunk[-(-size // LINE) * LINE :]
        return taken


def _mapped(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

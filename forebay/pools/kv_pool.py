"""The bytes of the KV cache: one K and one V buffer per layer, page 0 the padding page (C5)."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

from forebay.memory.slots import PAD


class KvPool:
    """K and V of every layer, `[(num_pages + 1) * page_size, num_kv_heads, head_dim]`, indexed by
    `page * page_size + offset`. Page 0 is never handed out: writes that must go nowhere go there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (2, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        self._layers = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]

    def k(self, layer: int) -> Tensor:
        return self._layers[layer][0]

    def v(self, layer: int) -> Tensor:
        return self._layers[layer][1]

    def reset_padding(self) -> None:
        """Make page 0 what it was at first, after a run whose writes had to go nowhere."""
        for layer in self._layers:
            layer[:, PAD * self.page_size : (PAD + 1) * self.page_size].zero_()

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self._layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system provides them page by page when they are first written.

    `torch.zeros` writes them all at once: 4 GiB then take ten seconds of start-up and are resident from the beginning.
    Huge pages, which numpy asks for, make a step wait for 2 MiB of zeros in each layer wherever it is the first to
    write: a 40-token prompt on scattered pages took 650 ms of CPU time instead of 38, and decoding gained nothing.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without huge pages does not know the word
        untouched.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(untouched, dtype=dtype).view(shape)

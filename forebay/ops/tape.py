"""A recording of native kernels: what was called, on which addresses, to be done again in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from forebay.ops.kernels import Kernels


class Tape:
    """Kernels in the order in which they were called. Whoever records keeps the memory alive that they were given."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._replay = kernels.bind("fb_tape_replay")
        self._tape = kernels.create("fb_tape", self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Kernels that this thread calls meanwhile, of whatever ops, are put at the tape's end and not run; one tape at
        a time."""
        record = self._kernels.bind("fb_tape_record")
        record(self._tape)
        try:
            yield
        finally:
            record(None)

    def __len__(self) -> int:
        return int(self._kernels.bind("fb_tape_length")(self._tape))

    def replay(self) -> None:
        """Run all recorded kernels in order, in one call, on the addresses that they were recorded with."""
        self._replay(self._tape)


def fill(kernels: Kernels, tensor: Tensor, value: float) -> bool:
    """As `tensor.fill_(value)`, by a kernel; False, with nothing done, for a tensor with gaps."""
    if not tensor.is_contiguous():
        return False
    pattern = torch.tensor(value, dtype=tensor.dtype).view(-1).view(torch.uint8).tolist()
    bits = int.from_bytes(bytes(pattern), "little")
    kernels.bind("fb_fill")(kernels.pool, tensor.data_ptr(), tensor.numel(), tensor.itemsize, bits)
    return True


def copy(kernels: Kernels, to: Tensor, source: Tensor) -> bool:
    """As `to.copy_(source)`, by a kernel; False, with nothing done, for other than rows of bytes of the same dtype."""
    if to.shape != source.shape or to.dtype != source.dtype:
        return False
    if to.is_contiguous() and source.is_contiguous():
        to, source = to.view(1, -1), source.view(1, -1)
    if to.dim() != 2 or to.stride(1) != 1 or source.stride(1) != 1:
        return False
    rows, n = to.shape
    size = to.itemsize
    kernels.bind("fb_copy_rows")(
        kernels.pool,
        to.data_ptr(),
        to.stride(0) * size,
        source.data_ptr(),
        source.stride(0) * size,
        n * size,
        rows,
    )
    return True

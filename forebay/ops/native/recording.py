"""A recording of native kernels: the calls with their addresses, to be repeated in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from forebay.ops.native.kernels import Kernels


class Recording:
    """Kernels in the order in which they were called. The recorder keeps the memory of their arguments alive."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._replay = kernels.bind("fb_recording_replay")
        self._address = kernels.create("fb_recording", self)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Append the kernels that this thread calls meanwhile, of whatever ops, instead of running them. A thread makes
        one recording at a time."""
        record = self._kernels.bind("fb_recording_record")
        record(self._address)
        try:
            yield
        finally:
            record(None)

    def __len__(self) -> int:
        return int(self._kernels.bind("fb_recording_length")(self._address))

    def replay(self) -> None:
        """Run all recorded kernels in order, in one call, on the addresses that they were recorded with."""
        self._replay(self._address)


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

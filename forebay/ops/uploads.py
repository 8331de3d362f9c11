"""Weights on their way to a GPU, through pinned memory: one buffer is filled while the other is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BUFFER_BYTES: Final = 32 << 20

Fill = Callable[[Tensor, Tensor], bool]
"""Convert the first tensor [n] into the second [n], in host memory. Return whether all of it may be used."""


class Uploads:
    """Copies to a GPU on the stream that is current. Not safe to call from two threads at once."""

    def __init__(self, device: torch.device | str, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device, self._buffer_bytes = torch.device(device), buffer_bytes
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    @classmethod
    def to(cls, device: torch.device | str) -> Uploads | None:
        """Return uploads to a GPU; None for a device whose memory is the host's."""
        return cls(device) if torch.device(device).type == "cuda" else None

    def send(self, source: Tensor, target: Tensor, fill: Fill) -> bool:
        """Copy source [n] on the host to target [n] on the GPU, in its type, by `fill`, part by part. Return whether
        all of it may be used."""
        self._buffers = self._buffers or [pinned((self._buffer_bytes,), torch.uint8) for _ in range(2)]
        most, usable = self._buffer_bytes // target.itemsize, True
        for first in range(0, len(source), most):
            part = source[first : first + most]
            self._turn = 1 - self._turn
            if (sent := self._sent[self._turn]) is not None:
                sent.synchronize()
            buffer = self._buffers[self._turn][: len(part) * target.itemsize].view(target.dtype)
            usable &= fill(part, buffer)
            target[first : first + most].copy_(buffer, non_blocking=True)
            self._sent[self._turn] = torch.cuda.current_stream(self._device).record_event()
        return usable

    def array(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return a copy of an array on the GPU."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.send(source.view(-1), target.view(-1), _copy)
        return target


def _copy(source: Tensor, target: Tensor) -> bool:
    target.copy_(source)
    return True


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return pinned host memory. Its allocator keeps it until copies from and to it are done."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)

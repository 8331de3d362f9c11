"""Many small arrays in one host buffer, so that a step's inputs cross to the device in one copy (C10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MAX_LAYOUTS: Final = 1024  # layouts whose views are kept: batch sizes x row writes; prompts' lengths come and go

_NUMPY: Final[Mapping[torch.dtype, Any]] = {torch.int64: np.int64, torch.int32: np.int32, torch.float64: np.float64}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Views:
    """One layout's sections by name: the host's to write, the device's to read after `Packing.send`."""

    num_words: int
    host: dict[str, Array]
    device: dict[str, Tensor]


class _Buffer:
    """A pair of int64 buffers and the views into them that were made so far."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(num_words, dtype=torch.int64, pin_memory=pinned)
        self.array = self.host.numpy()
        self.device = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.views: dict[tuple[int, ...], Views] = {}
        self.sent: torch.cuda.Event | None = None  # when the last copy from here is through


class Packing:
    """Sections of declared dtypes (of 8 or 4 bytes), each starting at a whole word, in a ring of buffers.

    A buffer is written again only after `num_buffers - 1` other steps, and once its copy to the device has completed.
    """

    def __init__(
        self, sections: Mapping[str, torch.dtype], device: torch.device, *, num_words: int, num_buffers: int = 2
    ) -> None:
        self._sections = tuple(sections.items())
        self._device = device
        self._buffers = [_Buffer(num_words, device) for _ in range(num_buffers)]
        self._turn = 0

    def begin(self, counts: tuple[int, ...]) -> Views:
        """The views for sections of `counts` elements, in the order of declaration, in the next buffer of the ring."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer.sent is not None:
            buffer.sent.synchronize()
        views = buffer.views.get(counts)
        return views if views is not None else self._layout(counts)

    def send(self, views: Views) -> None:
        """Start the one copy of everything to the device."""
        buffer = self._buffers[self._turn]
        n = views.num_words
        buffer.device[:n].copy_(buffer.host[:n], non_blocking=True)
        if buffer.device.is_cuda:
            buffer.sent = torch.cuda.current_stream(buffer.device.device).record_event()

    def _layout(self, counts: tuple[int, ...]) -> Views:
        words = [-(-n * dtype.itemsize // 8) for n, (_, dtype) in zip(counts, self._sections, strict=True)]
        total = sum(words)
        buffer = self._buffers[self._turn]
        if total > len(buffer.host):
            buffer = self._buffers[self._turn] = _Buffer(2 * total, self._device)
        if len(buffer.views) >= _MAX_LAYOUTS:
            buffer.views.clear()
        host: dict[str, Array] = {}
        device: dict[str, Tensor] = {}
        array, start = buffer.array, 0
        for (name, dtype), n, size in zip(self._sections, counts, words, strict=True):
            host[name] = array[start : start + size].view(_NUMPY[dtype])[:n]
            device[name] = buffer.device[start : start + size].view(dtype)[:n]
            start += size
        buffer.views[counts] = views = Views(total, host, device)
        return views

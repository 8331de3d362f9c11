"""Many small arrays in one host buffer, so that a step's inputs cross to the device in one copy (C10)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MAX_LAYOUTS: Final = 1024  # layouts whose views are kept: batch sizes x row writes; prompts' lengths come and go

_NUMPY: Final[Mapping[torch.dtype, Any]] = {torch.int64: np.int64, torch.int32: np.int32, torch.float64: np.float64}

Array = npt.NDArray[Any]


class Sections(dict[str, Tensor]):
    """The arrays that were sent, by name, on the device; others are empty. They are views of a buffer, valid until the
    next step but one is sent."""

    def __init__(self, nothing: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._nothing = nothing

    def __missing__(self, name: str) -> Tensor:
        return self._nothing[name]

    def of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those of `names` that were sent."""
        return {name: self[name] for name in names if name in self}


class _Views(NamedTuple):
    """One layout's sections: the host's to write, the device's to read; and the part of both buffers that they fill."""

    host: list[Array]
    device: Sections
    source: Tensor
    destination: Tensor


class _Buffer:
    """A pair of int64 buffers and the views into them that were made so far."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(num_words, dtype=torch.int64, pin_memory=pinned)
        self.array = self.host.numpy()
        self.device = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.views: dict[tuple[object, ...], _Views] = {}
        self.sent: torch.cuda.Event | None = None  # when the last copy from here is through


class Packing:
    """Sections of declared dtypes (of 8 or 4 bytes), each starting at a whole word, in a ring of buffers.

    A buffer is written again only after `num_buffers - 1` other steps, and once its copy to the device has completed.
    """

    def __init__(
        self, sections: Mapping[str, torch.dtype], device: torch.device, *, num_words: int, num_buffers: int = 2
    ) -> None:
        self._dtypes = dict(sections)
        self._nothing = {name: torch.empty(0, dtype=dtype, device=device) for name, dtype in sections.items()}
        self._device = device
        self._buffers = [_Buffer(num_words, device) for _ in range(num_buffers)]
        self._turn = 0

    def send(self, arrays: Mapping[str, Array]) -> Sections:
        """Start the one copy of everything to the device. KeyError for a section that was not declared."""
        sent = {name: values for name, values in arrays.items() if len(values)}
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer.sent is not None:
            buffer.sent.synchronize()
        views = buffer.views.get((*sent, *map(len, sent.values()))) or self._layout(sent)
        for section, values in zip(views.host, sent.values(), strict=True):
            section[:] = values
        views.destination.copy_(views.source, non_blocking=True)
        if views.destination.is_cuda:
            self._buffers[self._turn].sent = torch.cuda.current_stream(views.destination.device).record_event()
        return views.device

    def _layout(self, sent: Mapping[str, Array]) -> _Views:
        words = {name: -(-len(values) * self._dtypes[name].itemsize // 8) for name, values in sent.items()}
        total = sum(words.values())
        buffer = self._buffers[self._turn]
        if total > len(buffer.host):
            buffer = self._buffers[self._turn] = _Buffer(2 * total, self._device)
        if len(buffer.views) >= _MAX_LAYOUTS:
            buffer.views.clear()
        host, device, start = [], Sections(self._nothing), 0
        for name, values in sent.items():
            dtype, stop, n = self._dtypes[name], start + words[name], len(values)
            host.append(buffer.array[start:stop].view(_NUMPY[dtype])[:n])
            device[name] = buffer.device[start:stop].view(dtype)[:n]
            start = stop
        key = (*sent, *map(len, sent.values()))
        buffer.views[key] = views = _Views(host, device, buffer.host[:total], buffer.device[:total])
        return views

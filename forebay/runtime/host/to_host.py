"""The one way in which a step's results leave the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class ToHost:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> npt.NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array

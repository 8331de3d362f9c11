"""Copies between a GPU and the host on a stream of their own, so that steps do not wait for the bus.

The stream of steps and this one wait for each other by events, and the host waits for none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops.uploads import pinned


class CopyStream:
    """Copies in the order of their calls. The caller's stream is the one that is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, rows: Tensor) -> Tensor:
        """Return pinned memory that gets what the caller's stream has written to `rows` until now. `behind` returns the
        event to wait for before it is read."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        host = pinned(rows.shape, rows.dtype)
        with torch.cuda.stream(self._stream):
            host.copy_(rows, non_blocking=True)
        rows.record_stream(self._stream)
        return host

    def to_device(self, rows: Tensor) -> Tensor:
        """Return a copy of rows of host memory, for the work that the caller's stream gets from now on. If `rows` came
        from `to_host`, they may still be arriving."""
        source = rows if rows.is_pinned() else pinned(rows.shape, rows.dtype).copy_(rows)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            arrived = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
            arrived.copy_(source, non_blocking=True)
        current.wait_event(self._stream.record_event())
        arrived.record_stream(current)
        return arrived

    def behind(self) -> torch.cuda.Event:
        """Return an event behind all copies so far."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def arrived(self) -> torch.cuda.Event:
        """Return an event behind all that the caller's stream does with copies to the device so far."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

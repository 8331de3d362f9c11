"""Where the device finds a page of windowed layers: they have fewer pages than those that keep all tokens."""

from __future__ import annotations

import torch

from forebay.memory.slots import PAD
from forebay.pools.table import Column, Table


class WindowPages(Table):
    """Row p is about page p; `full_to_window` is its window page, or NO_SLOT where the windows have moved past it."""

    full_to_window = Column(torch.int32, pad=PAD)

    def __init__(self, num_pages: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__(num_pages + 1, device=device)

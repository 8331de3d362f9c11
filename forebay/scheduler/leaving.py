"""What requests have let go of while steps that may still touch it were in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from forebay.memory.radix_node import Node, Pin
from forebay.memory.slots import PAD, Ids

NOTHING: Final[Ids] = np.empty(0, dtype=np.int64)


def _nothing() -> Ids:
    return NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Released when `after_step` has committed. Whatever a request did not have is empty."""

    after_step: int
    request_id: int
    row: int = PAD  # PAD when it kept its row
    pages: Ids = field(default_factory=_nothing)  # its own KV pages
    pin: Pin | None = None
    window_pages: Ids = field(default_factory=_nothing)  # its own, by their numbers in the window pool
    unlocked: Ids = field(default_factory=_nothing)  # the cache's pages whose windows it no longer reads
    state_slots: Ids = field(default_factory=_nothing)
    source: Node | None = None  # whose state a step copied

    @property
    def num_pages(self) -> int:
        """Pages that become available when this is released, at most."""
        return len(self.pages) + (self.pin.num_pages if self.pin else 0)

"""State slots of recurrent layers (C6, C7). Slots are ids here; their bytes live in `pools.cache_pool`.

What a slot must become before the next step reads it, zeros or the copy of another, is queued here and goes into that
step's plan, so that it is done in order: after the steps launched before, and before the plan's own model step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.config.engine_config import Ledger
from forebay.memory.slots import Ids, Slots, as_ids


class MambaPool(Slots):
    """`size` state slots; slot 0 is the padding slot and is never handed out."""

    def __init__(self, size: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        super().__init__("state", size, ledger=ledger)
        self._clears: list[int] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return self.capacity

    def alloc(self, n: int, owner: int) -> list[int]:
        """Take n slots; what they hold is undefined until `clear_state` or `copy_from`. Raises OutOfSlots."""
        if n == 1:
            return [self.take_one(owner)]
        slots: list[int] = self.take_ids(n, owner).tolist()
        return slots

    def free(self, slots: Sequence[int] | Ids, owner: int) -> None:
        self.return_ids(np.asarray(slots, dtype=np.int64), owner)

    def available_size(self) -> int:
        return self.num_free

    def clear_state(self, slot: int) -> None:
        """The next step begins by making the slot zeros: its request starts from nothing."""
        self._clears.append(slot)

    def copy_from(self, src: int, dst: int) -> None:
        """The next step begins by copying slot `src` to `dst`. The caller keeps `src` from being released until that
        step has completed."""
        self._copies.append((src, dst))

    def take_clears(self) -> Ids:
        clears, self._clears = self._clears, []
        return as_ids(clears)

    def take_copies(self) -> tuple[Ids, Ids]:
        """Sources and destinations."""
        copies, self._copies = self._copies, []
        return as_ids([src for src, _ in copies]), as_ids([dst for _, dst in copies])

    def clear(self) -> None:
        super().clear()
        self._clears, self._copies = [], []

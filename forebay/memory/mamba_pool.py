"""State slots of recurrent layers (C6, C7). Slots are ids here; their bytes live in `pools.cache_pool`.

What a slot must become before the next step reads it, zeros or the copy of another, is written into that step's draft
and done in order: after the steps launched before, and before the plan's own model step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.config.engine_config import Ledger
from forebay.memory.draft import Draft
from forebay.memory.slots import Ids, Slots


class MambaPool(Slots):
    """`size` state slots; slot 0 is the padding slot and is never handed out."""

    def __init__(self, size: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        super().__init__("state", size, ledger=ledger)

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

    def clear_state(self, slot: int, draft: Draft) -> None:
        """The step begins by making the slot zeros: its request starts from nothing."""
        draft.clears.append(slot)

    def copy_from(self, src: int, dst: int, draft: Draft) -> None:
        """The step begins by copying slot `src` to `dst`. The caller keeps `src` from being released until it has
        completed."""
        draft.copies.append((src, dst))

"""What becomes of the states of sequences that were verified: what each op does for every backend, and its definition
in torch.

A verified sequence's state is read and not written: it is kept behind each token in a scratch row of the tables, and
when it is known how many of the tokens stay, the one behind the last of those is copied.

Shape letters: S sequences, T tokens, K state rows (slot 0 is the padding slot), C columns of the state tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.ops.recurrence import StateBatch, write_states


@dataclass(frozen=True, slots=True, eq=False)
class StateColumns:
    """All that a state is made of: tables [K, ..] without gaps, of all layers. Whoever makes it keeps them where they
    are. `places` [C, 2] int64, on their device: where each begins, and the bytes of a row."""

    tables: tuple[Tensor, ...]
    places: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = [(table.data_ptr(), table.stride(0) * table.itemsize) for table in self.tables]
        device = self.tables[0].device if self.tables else "cpu"
        object.__setattr__(self, "places", torch.tensor(places, dtype=torch.int64, device=device).view(-1, 2))


class Wishes(NamedTuple):
    """At which length a sequence's state is to be kept in another slot as well, if it comes to it; slot 0 for none."""

    lens: Tensor  # [S] int64
    slots: Tensor  # [S] int32


class StateOps:
    def commit_states(
        self, columns: StateColumns, batch: StateBatch, positions: Tensor, num_new: Tensor, wishes: Wishes
    ) -> None:
        """Let the states follow the first num_new [S] int64 of each sequence's tokens, at positions [T] int64.

        `batch` is the step's: `snap_start` is `q_start`, and snap_slots[t] the scratch row behind token t, or 0 for the
        one token of a sequence that is not verified, whose state is in its slot already. Copied are the row behind the
        last of the num_new tokens, to the sequence's slot, and the one at a wished length that they come to, to the
        wish's slot. Nothing happens to a sequence without a token, and nothing is written to slot 0 (C14).
        """
        first, num_tokens = batch.q_start[:-1].long(), len(positions)
        if not num_tokens:
            return
        slots = batch.slots.long()
        wished = wishes.lens - positions[first.clamp(max=num_tokens - 1)]
        come_to = (wished > 0) & (wished <= num_new)
        for count, counts, to in ((num_new, num_new > 0, slots), (wished, come_to, wishes.slots.long())):
            scratch = batch.snap_slots[(first + count - 1).clamp(0, num_tokens - 1)].long()
            source = torch.where(scratch > 0, scratch, slots)
            for table in columns.tables:
                write_states(table, torch.where(counts & (source != to), to, 0), table[source])

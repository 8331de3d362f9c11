"""The part of a step's plan about recurrent states."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from forebay.base.parts import I64, Column, Part
from forebay.memory.slots import NO_IDS, PAD


class StateWork(Part, frozen=True, kw_only=True):
    """Sequence i's recurrent state is in slot `state_slots[i]`. `clears` are slots that become zeros, `copy_dst` those
    that become what `copy_src` are.

    Snapshots, by sequence and then by length: the state of sequence `snap_seqs[j]` at KV length `snap_lens[j]` (behind
    the step's first token, at most at its end) also goes to slot `snap_slots[j]`. A decode has one at most, and that is
    a wish: it is taken if the decode's accepted tokens reach that length, which the host may not know.

    Lengths of columns: S sequences, N snapshots, C clears, D copies.
    """

    state_slots: Annotated[I64, Column("S", "state", device=np.int32, pad=PAD)] = NO_IDS
    snap_seqs: Annotated[I64, Column("N", "seqs")] = NO_IDS
    snap_lens: Annotated[I64, Column("N", "lengths")] = NO_IDS
    snap_slots: Annotated[I64, Column("N", "state", least=1, device=np.int32)] = NO_IDS
    clears: Annotated[I64, Column("C", "state", least=1, device=np.int64)] = NO_IDS
    copy_src: Annotated[I64, Column("D", "state", least=1, device=np.int64)] = NO_IDS
    copy_dst: Annotated[I64, Column("D", "state", least=1, device=np.int64)] = NO_IDS

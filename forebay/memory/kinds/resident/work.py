"""The part of a step's plan about resident copies."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from forebay.base.parts import I64, Column, Part
from forebay.memory.slots import NO_IDS


class ResidentWork(Part, frozen=True, kw_only=True):
    """Page p has its resident copy in page `full_to_hisparse_device_index_mapping[p]`, 0 for none, from
    `mapping[resident_pages] = resident_slots` on. Pages `load_slots` become what pages `load_pages` of the host tier
    are. Rows `hot_rows` begin to decode, from hot buffers.

    Lengths of columns: R map writes, L loads, H rows.
    """

    resident_pages: Annotated[I64, Column("R", "kv", least=1, device=np.int64)] = NO_IDS
    resident_slots: Annotated[I64, Column("R", "resident", device=np.int32)] = NO_IDS
    load_pages: Annotated[I64, Column("L", "kv", least=1, device=np.int64)] = NO_IDS
    load_slots: Annotated[I64, Column("L", "resident", least=1, device=np.int64)] = NO_IDS
    hot_rows: Annotated[I64, Column("H", "rows", least=1, device=np.int64)] = NO_IDS

"""The columns that each kind of cache adds to a step's plan: their pools, least numbers and types on the device."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.base.parts import Part
from forebay.memory.kinds.resident.work import ResidentWork
from forebay.memory.kinds.state.work import StateWork
from forebay.memory.kinds.window.work import WindowWork

I32, I64 = np.int32, np.int64
COLUMNS = {
    WindowWork: {"map_pages": ("M", "kv", 1, I64, None), "map_windows": ("M", "window", 0, I32, None)},
    ResidentWork: {
        "resident_pages": ("R", "kv", 1, I64, None),
        "resident_slots": ("R", "resident", 0, I32, None),
        "load_pages": ("L", "kv", 1, I64, None),
        "load_slots": ("L", "resident", 1, I64, None),
        "hot_rows": ("H", "rows", 1, I64, None),
    },
    StateWork: {
        "state_slots": ("S", "state", 0, I32, 0),
        "snap_seqs": ("N", "seqs", 0, None, None),
        "snap_lens": ("N", "lengths", 0, None, None),
        "snap_slots": ("N", "state", 1, I32, None),
        "clears": ("C", "state", 1, I64, None),
        "copy_src": ("D", "state", 1, I64, None),
        "copy_dst": ("D", "state", 1, I64, None),
    },
}


@pytest.mark.parametrize("part", COLUMNS)
def test_columns_of_a_kind_index_their_pools_from_their_least_and_have_their_types(part: type[Part]) -> None:
    """Slot 0 is the padding: it may stand in a map, and is never written or copied."""
    declared = {
        name: (column.length, column.pool, column.least, column.device, column.pad)
        for name, column in part.columns.items()
    }
    assert declared == COLUMNS[part]
    assert all(not len(getattr(part(), name)) for name in declared)

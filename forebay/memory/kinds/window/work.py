"""The part of a step's plan about sliding windows."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from forebay.base.parts import I64, Column, Part
from forebay.memory.slots import NO_IDS


class WindowWork(Part, frozen=True, kw_only=True):
    """A windowed layer has page `full_to_window[p]` for p, from `full_to_window[map_pages] = map_windows` on. M is the
    number of window page writes."""

    map_pages: Annotated[I64, Column("M", "kv", least=1, device=np.int64)] = NO_IDS
    map_windows: Annotated[I64, Column("M", "window", device=np.int32)] = NO_IDS

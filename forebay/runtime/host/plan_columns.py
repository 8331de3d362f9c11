"""The columns of a plan as the device has them, from their declarations."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch

from forebay.base.parts import Column, paths_of
from forebay.pools import table
from forebay.requests.step_plan import StepPlan

_PATHS: Final = {path: column for path, column in paths_of(StepPlan).items() if column.device}

ON_DEVICE: Final[dict[str, Column]] = {
    column.device_name or path.rpartition(".")[2]: column for path, column in _PATHS.items()
}

arrays_of: Final[Callable[[StepPlan], tuple[np.ndarray[Any, Any], ...]]] = attrgetter(*_PATHS)
"""A plan's arrays for the columns of `ON_DEVICE`, in the same order."""


def dtype_of(column: Column) -> torch.dtype:
    return torch.int32 if column.device is np.int32 else torch.int64


def padded(*lengths: str) -> dict[str, table.Column]:
    """Inputs of captured steps: the columns that have a pad, as long as the sequences ("S") or the tokens ("T")."""
    return {
        name: table.Column(dtype_of(column), pad=column.pad)
        for name, column in ON_DEVICE.items()
        if column.pad is not None and column.length in lengths
    }

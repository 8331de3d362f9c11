"""The kinds of cache of an engine, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

import torch

from forebay.memory.kinds.build import KINDS
from forebay.ops import Ops
from forebay.pools.cache_pool import CachePool
from forebay.pools.request_rows import RequestRows
from forebay.pools.table import Column
from forebay.requests.step_plan import WORK_OF
from forebay.runtime.kinds.kind import DeviceKind

DEVICE_KINDS: Final[tuple[type[DeviceKind], ...]] = tuple(
    import_module(f"forebay.runtime.kinds.{declared.name}").DEVICE_KIND for declared in KINDS
)
DERIVED: Final = {name: dtype for kind in DEVICE_KINDS for name, dtype in kind.derived.items()}
DECODE_COLUMNS: Final = {name: column for kind in DEVICE_KINDS for name, column in kind.decode_columns.items()}
VERIFY_COLUMNS: Final = {name: column for kind in DEVICE_KINDS for name, column in kind.verify_columns.items()}
TOKEN_COLUMNS: Final = {name: column for kind in DEVICE_KINDS for name, column in kind.token_columns.items()}
END_COLUMNS: Final = {name: bounds for kind in DEVICE_KINDS for name, bounds in kind.end_columns.items()}


def of_kinds(columns: Mapping[str, Column], kinds: Sequence[DeviceKind]) -> dict[str, Column]:
    """Return the columns of a step of decodes without those of kinds that are not among `kinds`."""
    absent = {declared.name for declared in DEVICE_KINDS} - {kind.name for kind in kinds}
    left_out = {name for kind in DEVICE_KINDS if kind.name in absent for name in kind.decode_columns}
    left_out |= {own.device_name or name for kind in absent for name, own in WORK_OF[kind].columns.items()}
    return {name: column for name, column in columns.items() if name not in left_out}


def make_device_kinds(cache: CachePool, ops: Ops, rows: RequestRows) -> tuple[DeviceKind, ...]:
    """Make the kinds that the cache has."""
    counts = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=rows.kv_lens.device)
    return tuple(kind(cache, ops, counts) for kind in DEVICE_KINDS if cache.has(kind.name))

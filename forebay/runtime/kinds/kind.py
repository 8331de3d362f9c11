"""The device's side of a kind of cache: the input of its layers in each step, and the changes before a step.

Shape letters: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from forebay.pools.table import Column
from forebay.requests.step_plan import StepPlan
from forebay.runtime.host.packing import Array
from forebay.runtime.host.shape import Shape

NO_COLUMNS: Final[Mapping[str, Column]] = {}


class Columns(Protocol):
    """The inputs of a step by name: sections that were sent, or the table of a captured step."""

    def __getitem__(self, name: str, /) -> Tensor: ...


class DeviceKind:
    """A kind of cache on the device. The module `runtime/kinds/<name>.py` defines it as `DEVICE_KIND`; it exists if the
    cache has more of the kind than padding. The defaults are those of a kind without inputs of its own.

    A step gets its inputs as columns. Those of the plan are declared by the kind's part of the plan; `derived` are
    computed from the plan on the host, in `arrays`. Captured steps have tables of columns with pads:

    - `decode_columns` [S] of steps of decodes, `verify_columns` [S] of steps that verify;
    - `token_columns` [T] and `end_columns` [S] of steps of any tokens. A column of ends is named with the column
      [S + 1] that begins with 0 and has these ends behind it.
    """

    name: ClassVar[str]
    counts: Tensor | None = None  # [n] int64: totals that grow in steps, and return with the sampled tokens
    derived: ClassVar[Mapping[str, torch.dtype]] = {}
    decode_columns: ClassVar[Mapping[str, Column]] = NO_COLUMNS
    verify_columns: ClassVar[Mapping[str, Column]] = NO_COLUMNS
    token_columns: ClassVar[Mapping[str, Column]] = NO_COLUMNS
    end_columns: ClassVar[Mapping[str, str]] = {}

    def __init__(self, cache: CachePool, ops: Ops, counts: Tensor) -> None:
        """`counts` [R + 1] int32 are 0, 1, 2 and so on; a step has at most R sequences, padding included."""
        self._cache, self._ops = cache, ops

    def check(self, plan: StepPlan) -> None:
        """Raise IndexOutOfPool for a plan that the bounds of its columns do not show to be wrong."""

    def arrays(self, plan: StepPlan, shape: Shape, q_start: Array) -> dict[str, Array]:
        """Return the `derived` columns of a step. q_start [S + 1] is empty in a step of decodes of one token."""
        return {}

    def change(self, columns: Mapping[str, Tensor]) -> None:
        """Apply the plan's changes of this kind, before the model runs. Columns without entries are missing."""

    def inputs(self, shape: Shape, columns: Columns, q_start: Tensor, positions: Tensor) -> Any:
        """Return what `layer_input` needs of this step, computed on the device. q_start [S + 1] int32, positions
        [T] int64."""
        return None

    def layer_input(self, full: PagedKv, inputs: Any) -> Any:
        """Return the entry of `ForwardContext.kinds`. `inputs` is None in steps of draft models and heads."""
        raise NotImplementedError

    @property
    def settles(self) -> bool:
        """Return True if a step that verifies leaves something to `settle`."""
        return False

    def settle(self, inputs: Any, columns: Columns, q_start: Tensor, positions: Tensor, num_new: Tensor) -> None:
        """Finish a step that verified: num_new [S] int64 tokens of each sequence stay. `inputs` are those of the
        step."""


class PageMap:
    """The pages of a kind in a pool of its own: a map of the cache translates pages of full KV. The columns `pages` and
    `entries` of a plan are the pages whose entries change, and the new entries."""

    def __init__(self, cache: CachePool, ops: Ops, name: str, *, pages: str, entries: str) -> None:
        self._ops, self._map = ops, cache.page_maps[name]
        self._pages, self._entries = pages, entries

    def change(self, columns: Mapping[str, Tensor]) -> None:
        """Apply the plan's changes, before the model runs."""
        if self._pages in columns:
            self._map.index_copy_(0, columns[self._pages], columns[self._entries])

    def paged(self, full: PagedKv) -> PagedKv:
        """Return the pages and locations of this kind for the step of `full`."""
        return full.mapped(self._map, self._ops.steps.map_locations(full.out_cache_loc, self._map, full.page_size))

"""HiSparse on the device: resident copies for prompts, hot buffers for decodes (C23).

Shape letters: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from forebay.base.parts import I64
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.tiers import TierStep
from forebay.pools.cache_pool import CachePool
from forebay.requests.step_plan import StepPlan
from forebay.runtime.host.bounds import IndexOutOfPool
from forebay.runtime.host.shape import Shape
from forebay.runtime.kinds.kind import Columns, DeviceKind


class HostMirrors(NamedTuple):
    """The rows of a step and what the host knows of their lengths, from the plan: [S] int64 each. Only the device knows
    the length of a decode: it has at least the tokens of the step."""

    seq_lens_cpu: I64
    req_pool_indices_cpu: I64

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """Return the mirrors of a plan's sequences."""
        return cls(np.concatenate([plan.ends, plan.q_lens[plan.num_extends :]]), plan.rows)


class HisparseCoordinator(DeviceKind):
    """Binds the newest tokens of decoding rows to their hot buffers, and follows the plan's changes of resident copies.

    The layers' input is a `TierStep`. A row that is given out has an empty hot buffer and reads resident copies, until
    the plan names it among the rows that begin to decode.
    """

    name: ClassVar[str] = RESIDENT

    def __init__(self, cache: CachePool, ops: Ops, counts: Tensor) -> None:
        super().__init__(cache, ops, counts)
        assert cache.tiers is not None, "resident copies without a host tier"
        self._tiers = cache.tiers
        self.counts: Tensor = torch.zeros(2, dtype=torch.int64, device=counts.device)
        self._mirrors: HostMirrors | None = None  # of the step that is launched

    def check(self, plan: StepPlan) -> None:
        """Raise IndexOutOfPool for a resident page that two pages share, or for wrong host mirrors: a step that is
        replayed does not come to `map_last_loc_to_buffer`."""
        self._mirrors = HostMirrors.of(plan)
        self._check_mirrors(*self._mirrors)
        slots = plan.kinds.resident.resident_slots
        if len(slots) and len(held := slots[slots != 0]) != len(set(held.tolist())):
            raise IndexOutOfPool(f"resident_slots {slots} of a plan name a resident page twice")

    def change(self, columns: Mapping[str, Tensor]) -> None:
        rows = self._tiers.rows
        if "admit_rows" in columns:
            rows.reset_rows(columns["admit_rows"])
        if "hot_rows" in columns:
            rows["active"].index_fill_(0, columns["hot_rows"], 1)
        if "resident_pages" in columns:
            self._cache.page_maps[self.name].index_copy_(0, columns["resident_pages"], columns["resident_slots"])
        if "load_pages" in columns:
            self._cache.mover.load(columns["load_pages"], columns["load_slots"])

    def map_last_loc_to_buffer(
        self,
        seq_lens: Tensor,
        out_cache_loc: Tensor,
        req_pool_indices: Tensor,
        seq_lens_cpu: I64 | None = None,
        req_pool_indices_cpu: I64 | None = None,
        *,
        positions: Tensor | None = None,
        q_start: Tensor | None = None,
    ) -> TierStep:
        """Bind the newest tokens of each row to the last page of its hot buffer, by device values alone.

        seq_lens [S] int32 count the step's tokens, out_cache_loc [T] int64 are their locations in full KV, and
        req_pool_indices [S] int32 the rows. `positions` [T] int64 and `q_start` [S + 1] int32 None: a token of each
        row. The host mirrors of both, if the host has them, are checked: IndexOutOfPool for a row that does not exist,
        or for a sequence without tokens.
        """
        tiers, num_seqs = self._tiers, len(req_pool_indices)
        if seq_lens_cpu is not None and req_pool_indices_cpu is not None:
            self._check_mirrors(seq_lens_cpu, req_pool_indices_cpu)
        if q_start is None:
            q_start = torch.arange(num_seqs + 1, dtype=torch.int32, device=out_cache_loc.device)
        if positions is None:
            positions = seq_lens.long() - 1
        page_map, rows = self._cache.page_maps[self.name], tiers.rows
        places = self._ops.tiers.bind_newest(
            out_cache_loc, positions, req_pool_indices, q_start, page_map, rows["active"], rows["newest"], tiers.layout
        )
        return TierStep(
            layout=tiers.layout,
            page_map=page_map,
            active=rows["active"],
            newest=rows["newest"],
            device_loc=places[0],
            host_loc=places[1],
            counts=self.counts,
        )

    def inputs(self, shape: Shape, columns: Columns, q_start: Tensor, positions: Tensor) -> Tensor:
        return positions

    def layer_input(self, full: PagedKv, inputs: Tensor | None) -> TierStep | None:
        """Return None in steps of draft models and heads, whose KV is on the device."""
        if inputs is None:
            return None
        mirrors = self._mirrors or (None, None)
        return self.map_last_loc_to_buffer(
            full.seq_lens, full.out_cache_loc, full.rows, *mirrors, positions=inputs, q_start=full.q_start
        )

    def _check_mirrors(self, seq_lens_cpu: I64, req_pool_indices_cpu: I64) -> None:
        """Raise IndexOutOfPool for a row without a hot buffer, or for a sequence without tokens; one is enough."""
        if not len(req_pool_indices_cpu):
            return
        least, most, num_rows = (
            int(req_pool_indices_cpu.min()),
            int(req_pool_indices_cpu.max()),
            self._tiers.rows.num_rows,
        )
        if least < 0 or most >= num_rows:
            raise IndexOutOfPool(f"rows {least}..{most} of a step; there are {num_rows} hot buffers")
        if (shortest := int(seq_lens_cpu.min())) < 1:
            raise IndexOutOfPool(f"a sequence of a step has {shortest} tokens, at least its own is one")


DEVICE_KIND: Final = HisparseCoordinator

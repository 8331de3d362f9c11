"""Two tiers of KV on the hash model's device, by the ops and the coordinator of the real one (C23).

The host tier is the KV that the hash model reads. Each query of a step selects some of the tokens that it sees; what it
reads of them through resident copies and hot buffers must be what the host tier has.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.kinds.resident.residents import RESIDENT, Residents
from forebay.memory.kv_allocator import KV
from forebay.memory.slots import FREE, PAD
from forebay.ops.interface import Ops
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.pools.mover import Mover
from forebay.pools.table import Column
from forebay.pools.tiers import HotRows, Tiers, hot_columns
from forebay.requests.step_plan import StepPlan
from forebay.runtime.kinds.resident import HisparseCoordinator
from tests.kernels import VARIANTS, native_ops
from tests.simulation.device_memory import POISON, RunnerError

if TYPE_CHECKING:
    from tests.simulation.hash_runner import HashRunner
    from tests.simulation.hash_step import HashStep

_LAYER: Final = 0
_POISON: Final = int(np.uint64(POISON).astype(np.int64))


@cache
def _ops() -> Ops:
    """The native ops where there are some: many steps are run."""
    return native_ops(VARIANTS[0], 1) if VARIANTS else Ops(1)


class TierMemory:
    """Of one runner, whose KV lies in the host tier from now on. `top_k` tokens are selected for each query."""

    def __init__(self, runner: HashRunner, config: SchedulerConfig, *, num_columns: int, top_k: int) -> None:
        self._runner, self._top_k, page_size = runner, top_k, config.page_size
        self.residents: Residents | None = None  # of the scheduler: read to check, never to compute
        num_pages, num_resident = runner.pools.kv.num_rows, config.kinds.num_slots_of(RESIDENT) + 1
        columns, sizes = hot_columns([_LAYER]), {"S": num_columns, "P": page_size}
        rows = HotRows(runner.pools.rows.num_rows, columns=columns, sizes=sizes)
        self.tiers = Tiers(
            rows,
            num_columns=num_columns,
            page_size=page_size,
            num_pages=num_pages,
            num_resident=num_resident,
            take=lambda device, host: torch.zeros(device + host, dtype=torch.uint8),
        )
        on_host = self.tiers.column(f"{_LAYER}.k", Column(torch.int64, (page_size, 1, 1), pad=0))
        self.tiers.keep(_LAYER, lambda own: KvCache(own["k"], own["k"][..., :1]))
        words = on_host.view(-1).numpy().view(np.uint64)
        words[:] = runner.pages.words
        runner.pages.words = runner.kv = words
        runner.pages.by_slot = words.reshape(-1, page_size)
        page_map = torch.zeros(num_pages, dtype=torch.int32)
        mover = Mover({KV: {f"{_LAYER}.k": on_host}}, page_size, self.tiers.resident)
        cache: Any = SimpleNamespace(tiers=self.tiers, mover=mover, page_maps={RESIDENT: page_map})
        self.coordinator = HisparseCoordinator(cache, _ops(), torch.zeros(1, dtype=torch.int32))
        self.num_steps = self.num_from_copies = self.num_from_host = 0  # the latter two count tokens of prompts

    @property
    def counts(self) -> list[int]:
        """Return the tokens that decodes read, and those of them that were loaded."""
        return self.coordinator.counts.tolist()

    @property
    def _column(self) -> Tensor:
        tiers = self.tiers.of(_LAYER)
        assert tiers is not None
        return tiers.kv.k.view(-1)

    def change(self, plan: StepPlan, part: float = 1.0) -> None:
        """Apply what the plan changes before the model runs, or the first part of each of its columns."""
        self.coordinator.check(plan)
        work = plan.kinds.resident
        columns = {
            name: torch.from_numpy(getattr(work, name).copy()) for name in work.columns if len(getattr(work, name))
        }
        if "resident_slots" in columns:
            columns["resident_slots"] = columns["resident_slots"].int()
        if plan.admissions:
            columns["admit_rows"] = torch.tensor([admission.row for admission in plan.admissions])
        if part < 1.0:
            columns = {name: ids[: int(part * (len(ids) + 1))] for name, ids in columns.items()}
        self.coordinator.change(columns)

    def poison(self) -> None:
        """Let the device have garbage wherever it may: after a sleep, and in copies that no page has."""
        self._column[: self.tiers.layout.host_base] = _POISON
        self.tiers.rows.reset()

    def poison_free(self) -> None:
        """Poison the copies that no request holds."""
        assert self.residents is not None
        free = np.flatnonzero(self.residents.slots.owner <= FREE)
        by_page = self._column[: self.tiers.layout.hot_base].view(-1, self._runner.page_size)
        by_page[torch.from_numpy(free[free != PAD])] = _POISON

    def run(self, step: HashStep) -> None:
        """Store the step's KV, which the host tier has, on the device, and read what its queries select."""
        runner, plan, column = self._runner, step.plan, self._column
        self.num_steps += 1
        positions = step.starts[step.which] + step.inside
        q_start = np.concatenate([[0], np.cumsum(plan.q_lens)]).astype(np.int32)
        table = np.zeros_like(runner.table)  # as it was at the launch
        table[plan.rows, : step.pages.shape[1]] = step.pages
        paged = PagedKv(
            page_table=torch.from_numpy(table),
            rows=torch.from_numpy(plan.rows.astype(np.int32)),
            q_start=torch.from_numpy(q_start),
            seq_lens=torch.from_numpy((step.starts + plan.q_lens).astype(np.int32)),
            page_size=runner.page_size,
            out_cache_loc=torch.from_numpy(step.out_cache_loc.copy()),
        )
        inputs = self.coordinator.layer_input(paged, torch.from_numpy(positions))
        assert inputs is not None
        column[inputs.device_loc] = column[inputs.host_loc]
        selected, counts = self._select(plan, positions)
        tiers = self.tiers.of(_LAYER)
        assert tiers is not None
        found = (
            _ops().tiers.swap_in(torch.from_numpy(selected), torch.from_numpy(counts), paged, tiers, inputs).page_table
        )
        there = selected >= 0
        places = step.locations[step.which[:, None], np.maximum(selected, 0)]
        read = column[found.long().clamp(min=0)].numpy().view(np.uint64)
        if (wrong := there & (read != runner.kv[places])).any():
            token, number = np.argwhere(wrong)[0]
            tenant, at = step.tenants[step.which[token]], selected[token, number]
            raise RunnerError(f"step {plan.step}: request {tenant} reads another KV than its own at position {at}")
        cold = there & (step.which < plan.num_extends)[:, None]
        from_host = found.numpy() >= self.tiers.layout.host_base
        self.num_from_host += int((cold & from_host).sum())
        self.num_from_copies += int((cold & ~from_host).sum())

    def _select(self, plan: StepPlan, positions: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """Select tokens for each query [T, k], ascending, and their number [T]."""
        rng = np.random.default_rng(plan.step)
        selected = np.full((len(positions), self._top_k), -1, dtype=np.int32)
        counts = np.minimum(positions + 1, self._top_k).astype(np.int32)
        for token, (position, count) in enumerate(zip(positions.tolist(), counts.tolist(), strict=True)):
            # The last tokens more often, so that steps read again what is there.
            first = max(0, position + 1 - 3 * self._top_k) if rng.random() < 0.5 else 0
            selected[token, :count] = np.sort(first + rng.permutation(position + 1 - first)[:count])
        return selected, counts

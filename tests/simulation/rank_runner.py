"""The hash model's device of one rank of several: it has a part of all that layers keep, and rank 0 samples.

Everything in the hash model is a sum of products, so that a rank whose keys and salts are multiplied by a factor of its
own keeps words multiplied by it, and finds digests multiplied by it. Rank 0 has the factor 1. It adds up the digests of
all ranks, each with a weight; the weights sum up to 1. So a token is right if the memory of each rank is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from forebay.base.parts import I64
from forebay.config.engine_config import SchedulerConfig
from forebay.requests.step_plan import StepPlan, StepResult
from tests.simulation.faulty_device import CopyStep
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hash_step import HashStep, Pools
from tests.simulation.hashing import U64, HashModel
from tests.simulation.host_memory import HostMemory
from tests.simulation.row_lengths import Span
from tests.simulation.state_memory import StateMemory

FACTORS: Final = (1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, by rank
WEIGHTS: Final = (0, 0x165667B19E3779F9, 0x27D4EB2F165667C5)  # of ranks above 0; rank 0 has the rest


def combined(digests: Mapping[int, U64]) -> U64:
    """Return the digests of the whole model, from those of each rank."""
    total = digests[0]
    for rank in digests.keys() - {0}:
        whole = digests[rank] * np.uint64(pow(FACTORS[rank], -1, 1 << 64))
        total = total + np.uint64(WEIGHTS[rank]) * (whole - digests[0])
    return total


@dataclass
class SeenSlots:
    """A pool as it was when a plan was made, which a rank checks the plan against however late it executes it."""

    slots: Any
    owner: I64 = field(init=False)
    generation: I64 = field(init=False)

    def __post_init__(self) -> None:
        self.show(self.snapshot())

    def snapshot(self) -> tuple[I64, I64]:
        return self.slots.owner.copy(), self.slots.generation.copy()

    def show(self, snapshot: tuple[I64, I64]) -> None:
        self.owner, self.generation = snapshot

    def __getattr__(self, name: str) -> Any:
        return getattr(self.slots, name)


@dataclass
class SeenMap:
    """The map of windows of that moment."""

    map: Any
    full_to_window: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.map, name)


class SeenWindows:
    def __init__(self, windows: Any) -> None:
        self.slots, self.map = SeenSlots(windows.slots), SeenMap(windows.map)


class SeenPools:
    """Pools for the runners of ranks above 0: `pools` are as `show` says."""

    def __init__(self, pools: Pools) -> None:
        self.whole, self.windows = pools, SeenWindows(pools.windows) if pools.windows else None
        self.kv, self.rows = SeenSlots(pools.kv), SeenSlots(pools.rows)
        self.states = SeenSlots(pools.states) if pools.states else None
        self._seen = [seen for seen in (self.kv, self.rows, self.states) if seen is not None]
        if self.windows:
            self._seen.append(self.windows.slots)

    def snapshot(self) -> Any:
        maps = self.windows.map.map.full_to_window.copy() if self.windows else None
        return [seen.snapshot() for seen in self._seen], maps

    def show(self, snapshot: Any) -> None:
        for seen, own in zip(self._seen, snapshot[0], strict=True):
            seen.show(own)
        if self.windows:
            self.windows.map.full_to_window = snapshot[1]


class LaterStates(StateMemory):
    def _check_snapshots(self, plan: StepPlan, span: Span) -> None:
        """When a rank launches a step it may know more of the steps before than the plan did."""


class RankRunner(HashRunner):
    """The runner of a rank above 0. Its step is computed by `execute`, up to what is sampled from, and continues by
    `follow` with what rank 0 has sampled."""

    def __init__(self, rank: int, config: SchedulerConfig, pools: SeenPools, model: HashModel, **others: Any) -> None:
        super().__init__(config, pools, model, **others)  # type: ignore[arg-type]
        if pools.states:
            self.states = LaterStates(pools.states)  # type: ignore[arg-type]
            self.host = HostMemory(self.pages, self.windows, self.states)
        self.factor, self.digest = np.uint64(FACTORS[rank]), np.empty(0, dtype=np.uint64)

    def _keys(self, step: HashStep, tokens: I64) -> U64:
        return super()._keys(step, tokens) * self.factor

    def _state_keys(self, step: HashStep, tokens: I64) -> U64:
        return super()._state_keys(step, tokens) * self.factor

    def _known(self, step: HashStep, tokens: I64) -> U64:
        return super()._known(step, tokens) * self.factor

    def _origins(self, rows: I64) -> U64:
        return super()._origins(rows) * self.factor

    def _content(self, chain: U64) -> U64:
        return chain * self.factor

    def _values(self, step: HashStep, digest: U64) -> U64:
        self.digest = digest
        return digest

    def _sample(self, step: HashStep, tokens: I64, values: U64, hidden: U64, poisoned: Mapping[int, int]) -> StepResult:
        """Rank 0 does so."""
        return StepResult(token_ids=[])

    def follow(self, step: HashStep, sampled: StepResult, drafts: I64, failed: tuple[int, ...]) -> None:
        """Continue a step that was executed; `failed` are not finite here, `drafts` [R, W - 1] of rank 0's rows."""
        plan = step.plan
        accepted = np.array(sampled.num_new) if sampled.num_new else plan.q_lens.copy()
        rows = plan.rows[step.which[step.sampled]][self._kept(step, accepted)]
        self._go_on(step, rows, np.array(sampled.token_ids, dtype=np.int64), accepted, {*sampled.failed, *failed})
        self.draft_tokens[plan.rows] = drafts[plan.rows]

    def discard(self, step: HashStep | CopyStep) -> None:
        """The step failed on rank 0, or here, and may have left anything behind. Raises StepFailed."""
        if isinstance(step, CopyStep):
            step.result(fails=True)
        else:
            self.execute(step, fails=True, poisoned={})

    def start(self, plan: StepPlan) -> HashStep | CopyStep:
        """As `FaultyDevice.launch`, without faults."""
        return self.launch(plan) if plan.num_seqs else CopyStep(self, plan)

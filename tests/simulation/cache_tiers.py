"""Tiers of the prefix cache under random traffic: what is stored and fetched, some of which is lost.

python -m tests.simulation.cache_tiers --seed 1234             replay one seed
python -m tests.simulation.cache_tiers --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from forebay.base.parts import I32, I64
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.radix_node import Node
from forebay.memory.slots import PAD
from forebay.memory.tier import Tier
from forebay.requests.step_plan import StepPlan, TierCopy
from forebay.scheduler.scheduler import Scheduler
from tests.simulation.command_line import command_line
from tests.simulation.device_memory import POISON, RunnerError, check_ids
from tests.simulation.event_log import Outcome
from tests.simulation.hashing import U64, Rows, chain_of, keys_of, state_keys_of, states_after, windowed
from tests.simulation.state_memory import StateMemory
from tests.simulation.violation import Violation
from tests.simulation.window_memory import WindowMemory

if TYPE_CHECKING:
    from tests.simulation.hash_runner import HashRunner

NO_LEN: Final = -1


class TierWords:
    """The words of one tier, by its slots."""

    def __init__(self, num_slots: Mapping[str, int], page_size: int) -> None:
        self.kv: U64 = np.full((num_slots["kv"] + 1, page_size), POISON, dtype=np.uint64)
        self.windows: U64 = np.full((num_slots.get("window", 0) + 1, page_size), POISON, dtype=np.uint64)
        self.states: U64 = np.full(num_slots.get("state", 0) + 1, POISON, dtype=np.uint64)
        self.lens: I64 = np.full(len(self.states), NO_LEN, dtype=np.int64)


class TierMemory:
    """All tiers of one engine. A copy is lost if `loses` returns True."""

    def __init__(self, runner: HashRunner, config: SchedulerConfig) -> None:
        self.tiers = {name: TierWords(num_slots, config.page_size) for name, num_slots in config.tiers.items()}
        self._runner = runner
        self.loses: Callable[[], bool] = lambda: False
        self.num_fetched = self.num_lost = 0

    def store(self, plan: StepPlan) -> tuple[int, ...]:
        """Copy to the tiers, before anything else is written, but for what is lost."""
        lost = tuple(copy.number for copy in plan.host.stores if self.loses())
        windows, states = self._windows, self._states
        for copy in plan.host.stores:
            here, there, words = copy.slots, copy.there, self.tiers[copy.tier]
            if copy.number in lost:
                self._spoil_tier(copy)
                continue
            check_ids(self._runner.pools.kv, "stored pages", here["kv"])
            words.kv[there["kv"]] = self._runner.pages.by_slot[here["kv"]]
            if windows:
                words.windows[there["window"]] = windows.bytes.by_slot[here["window"]]
            if states:
                words.states[there["state"]] = states.states[here["state"]]
                words.lens[there["state"]] = states.lens[here["state"]]
        return lost

    def fetch(self, plan: StepPlan) -> tuple[int, ...]:
        """Copy from the tiers, but for what is lost."""
        lost = tuple(copy.number for copy in plan.host.fetches if self.loses())
        windows, states = self._windows, self._states
        for copy in plan.host.fetches:
            here, there, words = copy.slots, copy.there, self.tiers[copy.tier]
            if copy.number in lost:
                self._spoil_device(copy)
                continue
            self._runner.pages.by_slot[here["kv"]] = words.kv[there["kv"]]
            if windows:
                windows.bytes.by_slot[here["window"]] = words.windows[there["window"]]
            if states:
                for slot, source in zip(here["state"].tolist(), there["state"].tolist(), strict=True):
                    states.put(slot, words.states[source], int(words.lens[source]))
        self.num_fetched += len(plan.host.fetches)
        self.num_lost += len(lost)
        return lost

    def spoil(self, plan: StepPlan) -> None:
        """A step fails: what it was to copy, here or there, may hold anything."""
        for copy in plan.host.stores:
            self._spoil_tier(copy)
        for copy in plan.host.fetches:
            self._spoil_device(copy)

    def _spoil_tier(self, copy: TierCopy) -> None:
        words = self.tiers[copy.tier]
        words.kv[copy.there["kv"]] = POISON
        words.windows[copy.there.get("window", [])] = POISON
        words.states[copy.there.get("state", [])] = POISON

    def _spoil_device(self, copy: TierCopy) -> None:
        self._runner.pages.by_slot[copy.slots["kv"]] = POISON
        if self._windows:
            self._windows.bytes.by_slot[copy.slots["window"]] = POISON

    @property
    def _windows(self) -> WindowMemory | None:
        return self._runner.windows

    @property
    def _states(self) -> StateMemory | None:
        return self._runner.states

    # -- checking -----------------------------------------------------------------------------------------------------

    def check(self, scheduler: Scheduler, salt: Callable[[str], int], rows_of: Callable[[I32, int, int], Rows]) -> None:
        """Every page, window and state of a tier holds what exactly the tokens leave that its tree names, those of
        pictures with the rows that `rows_of` returns."""
        for tier in scheduler.memory.tiers.all:
            for namespace, root in tier.cache.index.roots.items():
                first = salt(f"0{namespace}" if tier.durable else namespace)
                self._check_below(tier, root, 0, first, 0, rows_of, (first, 0))

    def _check_below(
        self,
        tier: Tier,
        node: Node,
        start: int,
        chain: int,
        state: int,
        rows_of: Callable[[I32, int, int], Rows],
        before: tuple[int, int],
    ) -> None:
        """`before`: the salt of the namespace, and by how much more than its position text behind `node` is rotated."""
        words = self.tiers[tier.name]
        for child in node.children.values():
            tokens = np.frombuffer(child.key, dtype=np.int32)
            salt, delta = before
            rows = rows_of(tokens, salt, delta)
            right = chain_of(keys_of(tokens, rows), start, chain)
            pages, end = right.reshape(len(child.pages), -1), start + len(tokens)
            if self._runner.model.full and not np.array_equal(pages, words.kv[child.pages]):
                raise Violation(f"pages {child.pages} of {tier.name} do not hold the KV of their tokens")
            after = int(states_after(state_keys_of(tokens, rows), state, salt)[-1]) if self._states else 0
            for name, part in tier.parts.items():
                ends, slots = part.kept([child], child.pages)
                if part.at_ends:
                    found = [(int(words.states[slot]), int(words.lens[slot])) for slot in slots]
                    if found and found != [(after, end)]:
                        raise Violation(f"{name} slots {slots} of {tier.name} hold {found}, not that of {end} tokens")
                elif not np.array_equal(windowed(pages[ends - 1]), words.windows[slots]):
                    raise Violation(f"{name} slots {slots} of {tier.name} do not hold the KV of their tokens")
            self._check_below(tier, child, end, int(right[-1]), after, rows_of, (salt, rows.delta))


def slots_read(copies: Iterable[TierCopy], kind: str) -> list[I64]:
    """Return the device's slots of one kind that are yet to be stored."""
    return [copy.slots[kind] for copy in copies if kind in copy.slots]


def check_targets(plan: StepPlan, runner: HashRunner) -> None:
    """A fetch writes no padding, and no slot twice."""
    for copy in plan.host.fetches:
        for kind, ids in copy.slots.items():
            if len(ids) != len(copy.there[kind]) or (ids == PAD).any() or len(set(ids.tolist())) != len(ids):
                raise RunnerError(f"step {plan.step} fetches {copy.there[kind]} into {kind} slots {ids}")


def run_tiers(seed: int) -> Outcome:
    """Run a seed with tiers; in every second one clients want prefixes kept, in every fourth clients of several
    tenants."""
    from tests.simulation.simulator import run_seed

    return run_seed(seed, tiers=True, keeping=seed % 2 == 1, tenants=seed % 4 == 3)


def main() -> int:
    return command_line("tests.simulation.cache_tiers", __doc__ or "", run_tiers, Outcome(seeds=0))


if __name__ == "__main__":
    sys.exit(main())

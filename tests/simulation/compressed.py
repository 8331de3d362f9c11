"""The simulators with compressed KV (DeepSeek-V4): by turns one engine, one that sleeps, and a pair.

python -m tests.simulation.compressed --seed 1234              replay one seed
python -m tests.simulation.compressed --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from forebay.base.parts import I64
from forebay.config.engine_config import DisaggregationMode, SchedulerConfig
from forebay.memory.kinds.ring.rings import RING
from forebay.memory.slots import Slots
from forebay.requests.step_plan import HostCopy, StepPlan, StepResult, TierCopy
from forebay.scheduler import admission
from tests.simulation.command_line import command_line
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hash_step import HashStep
from tests.simulation.host_memory import HostMemory
from tests.simulation.pair import Half, Pair, random_pair_of
from tests.simulation.ring_memory import Floats, RingMemory
from tests.simulation.simulator import SHARED, Simulation, scaled_down
from tests.simulation.sleeping import Kept, Sleeping, SleepingSimulation
from tests.simulation.workload import Traffic, random_config, random_traffic, with_speculation


@dataclass(frozen=True, kw_only=True)
class CompressedOutcome:
    """Sums over seeds: entries that sequences saw, those among them that are made of two blocks, requests that came
    back from host memory and from another engine."""

    seeds: int = 1
    steps: int = 0
    entries: int = 0
    overlapping: int = 0
    copied: int = 0
    prebuilt: int = 0
    digest: str = ""

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        both = f"{self.digest}{other.digest}"
        return type(self)(**sums, digest=hashlib.sha256(both.encode()).hexdigest()[:8])

    @classmethod
    def of(cls, runners: Sequence[CompressedRunner], *, seeds: int = 1) -> Self:
        found = [runner.rings for runner in runners if runner.rings]
        counts = {
            "steps": sum(rings.num_steps for rings in found),
            "entries": sum(rings.num_entries for rings in found),
            "overlapping": sum(rings.num_overlapping for rings in found),
            "copied": sum(runner.host.num_loaded for runner in runners if isinstance(runner.host, HostMemoryOfRings)),
            "prebuilt": sum(runner.num_prebuilt for runner in runners if runner.rings),
        }
        return cls(seeds=seeds, digest=str(counts), **counts)


class HostMemoryOfRings(HostMemory):
    """Copies with entries and rings."""

    def __init__(self, runner: HashRunner, rings: RingMemory) -> None:
        super().__init__(runner.pages, runner.windows, runner.states)
        self._rings = rings
        self._of_rings: dict[int, dict[str, list[Floats]]] = {}
        self.num_loaded = 0

    def save(self, plan: StepPlan, lens: Sequence[int], broken: AbstractSet[int]) -> None:
        super().save(plan, lens, broken)
        for save in plan.host.saves:
            self._of_rings[save.request_id] = self._rings.copy(save.slots)

    def drop(self, plan: StepPlan) -> None:
        super().drop(plan)
        for request_id in plan.host.drops:
            self._of_rings.pop(request_id, None)

    def load(self, plan: StepPlan, row_of: Mapping[int, int]) -> None:
        super().load(plan, row_of)
        for load in plan.host.loads:
            self._rings.put(load.slots, self._of_rings.pop(load.request_id))
            self.num_loaded += 1

    def spoil(self, plan: StepPlan) -> None:
        super().spoil(plan)
        for save in plan.host.saves:
            copied = self._rings.copy(save.slots)
            self._of_rings[save.request_id] = {
                kind: [np.full_like(part, np.nan) for part in parts] for kind, parts in copied.items()
            }
        for load in plan.host.loads:
            self._rings.forget(load.slots)


class CompressedRunner(HashRunner):
    """A hash runner that keeps compressed KV beside the KV of all tokens; a model without the latter has none."""

    def __init__(self, config: SchedulerConfig, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        self.rings: RingMemory | None = None
        self.num_prebuilt = 0
        if (rates := rates_of(config)) and self.model.full:
            pair = config.disaggregation.mode is not DisaggregationMode.NULL
            self.rings = RingMemory(self, rates=rates, width=config.speculation.num_draft_tokens, movable=pair)
            self.host = HostMemoryOfRings(self, self.rings)

    def _settle(self, plan: StepPlan) -> None:
        super()._settle(plan)
        self.num_prebuilt += sum(each.prebuilt for each in plan.admissions)

    def _forward(self, step: HashStep, poisoned: Mapping[int, int]) -> StepResult:
        result = super()._forward(step, poisoned)
        if self.rings:
            self.rings.run(step)
        return result

    def _fail(self, step: HashStep) -> None:
        if self.rings:
            self.rings.spoil(step)
        super()._fail(step)

    def poison_free(self, pending: Iterable[HostCopy | TierCopy]) -> None:
        super().poison_free(pending)
        if self.rings:
            self.rings.poison_free()


if TYPE_CHECKING:
    _Mixed = Simulation
else:
    _Mixed = object


class Compressed(_Mixed):
    """Mixed into a simulation: rows have rings."""

    make_runner: ClassVar[type[HashRunner]] = CompressedRunner
    runner: CompressedRunner

    def __init__(self, config: SchedulerConfig, traffic: Traffic, rng: Random, *args: Any, **others: Any) -> None:
        super().__init__(with_rings(config), traffic, rng, *args, **others)


class CompressedSimulation(Compressed, Simulation):
    pass


class EntriesAsleep(Compressed, Sleeping):
    """Mixed into a simulation that sleeps: entries and rings are kept, put back and poisoned with the other caches."""

    kept_entries: Mapping[str, list[Floats]] = {}

    def keep(self, places: Mapping[str, I64]) -> int:
        if self.runner.rings:
            self.kept_entries = self.runner.rings.copy(places)
        return super().keep(places)

    def _put_back(self, kept: Kept) -> None:
        super()._put_back(kept)
        if self.runner.rings:
            self.runner.rings.put(kept.places, self.kept_entries)

    def _poison(self) -> None:
        super()._poison()
        if self.runner.rings:
            self.runner.rings.poison()


class CompressedSleeping(EntriesAsleep, SleepingSimulation):
    pass


class CompressedHalf(Compressed, Half):
    def slots(self, kind: str) -> Slots:
        """Return the slots of a kind: a ring's is its row."""
        return self.scheduler.pools.rows.slots if kind == RING else super().slots(kind)

    def words(self, kind: str) -> list[np.ndarray]:
        rings = self.runner.rings
        own = [] if kind == RING else super().words(kind)
        if not rings:
            return own
        more = rings.by_kind().get(kind, [])
        return own + (more if kind == RING else [memory.reshape(-1, *memory.shape[2:]) for memory in more])


def with_rings(config: SchedulerConfig) -> SchedulerConfig:
    """Give each row a ring."""
    rows = config.max_running_requests + config.disaggregation.decode_extra_slots
    kinds = config.kinds
    slot_bytes, num_slots = {**kinds.slot_bytes, RING: 40}, {**kinds.num_slots, RING: rows}
    return replace(config, kinds=replace(kinds, num_slots=num_slots, slot_bytes=slot_bytes))


def rates_of(config: SchedulerConfig) -> tuple[int, int] | None:
    """Return a larger and a smaller divisor of the page size; for both engines of a pair, whose pages may be twice as
    large, one that they share. None where there is none above 1."""
    pair = config.disaggregation.mode is not DisaggregationMode.NULL
    found = [rate for rate in (7, 3, 2) if config.page_size % rate == 0]
    if not found:
        return None
    return (found[0], found[0]) if pair else (4 if config.page_size % 4 == 0 else found[0], found[-1])


def runners_of(pair: Pair[CompressedHalf]) -> list[CompressedRunner]:
    """Return the runners of both engines, which compress KV only if both do: a page may have one token on one side."""
    runners = [pair.prefill.runner, pair.decode.runner]
    if not all(runner.rings for runner in runners):
        for runner in runners:
            runner.rings = None
    return runners


def run_seed(seed: int) -> CompressedOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down(Random(seed).choice([SHARED, admission.SHARE_WORTH_WAITING]), **_times(seed)):
            if seed % 3 == 2:
                pair = random_pair_of(seed, Pair[CompressedHalf], CompressedHalf)
                runners = runners_of(pair)
                pair.run()
                return CompressedOutcome.of(runners)
            return CompressedOutcome.of([_run_one(seed)])
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.compressed --seed {seed}")
        raise


def _times(seed: int) -> dict[str, float]:
    return {"expire_interval_s": 1e9} if seed % 3 == 1 else {}


def _run_one(seed: int) -> CompressedRunner:
    rng, widths = Random(f"{seed} compressed"), Random(f"{seed} widths")
    drawn = random_config(rng)
    while drawn.page_size == 1:
        drawn = random_config(rng)
    config = with_speculation(widths, drawn)
    traffic = random_traffic(rng, config)
    if seed % 3 == 0:
        sim: Compressed = CompressedSimulation(config, traffic, rng, widths=widths)
    else:
        sim = CompressedSleeping(config, traffic, rng, widths=widths, chance=0.1, keeps=widths.random() < 0.5)
    sim.run()
    return sim.runner


def run_seeds(seeds: Iterable[int]) -> CompressedOutcome:
    return sum(map(run_seed, seeds), CompressedOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.compressed", __doc__ or "", run_seed, CompressedOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

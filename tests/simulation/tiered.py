"""The simulators with KV in two tiers (HiSparse): by turns one engine, one that sleeps, and a pair.

python -m tests.simulation.tiered --seed 1234              replay one seed
python -m tests.simulation.tiered --seeds 0:10000 --jobs 2
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forebay.config.engine_config import SchedulerConfig, SpeculationOptions
from forebay.memory.kinds.resident.residents import RESIDENT, Residents
from forebay.requests.step_plan import HostCopy, StepPlan, StepResult, TierCopy
from forebay.scheduler import admission
from tests.simulation.command_line import command_line
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hash_step import HashStep
from tests.simulation.pair import Half, Pair, random_pair_of
from tests.simulation.simulator import SHARED, Simulation, scaled_down
from tests.simulation.sleeping import SleepingSimulation
from tests.simulation.tier_memory import TierMemory
from tests.simulation.workload import random_config, random_traffic, with_speculation

MOST_TOP_K = 6


@dataclass(frozen=True, kw_only=True)
class TieredOutcome:
    """Sums over seeds. Tokens that decodes read and loaded, and that prompts read from either place."""

    seeds: int = 1
    steps: int = 0
    read: int = 0
    loaded: int = 0
    from_copies: int = 0
    from_host: int = 0
    digest: str = ""

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        both = f"{self.digest}{other.digest}"
        return type(self)(**sums, digest=hashlib.sha256(both.encode()).hexdigest()[:8])

    @classmethod
    def of(cls, runners: Iterable[TieredRunner], *, seeds: int = 1) -> Self:
        sums = [
            (runner.tiers.num_steps, *runner.tiers.counts, runner.tiers.num_from_copies, runner.tiers.num_from_host)
            for runner in runners
            if runner.tiers
        ]
        steps, read, loaded, from_copies, from_host = map(sum, zip((0,) * 5, *sums, strict=True))
        counts = {"steps": steps, "read": read, "loaded": loaded, "from_copies": from_copies, "from_host": from_host}
        return cls(seeds=seeds, digest=str(counts), **counts)


class TieredRunner(HashRunner):
    """A hash runner that keeps its KV in two tiers; a model that keeps no KV of all tokens has one."""

    def __init__(self, config: SchedulerConfig, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        rng, self.tiers = Random(f"{config.num_pages} {config.context_length}"), None
        self._partial: deque[tuple[int, StepPlan, float]] = deque()  # failed launches, each behind a step
        if config.kinds.num_slots_of(RESIDENT):
            top_k = rng.randint(1, MOST_TOP_K)
            self.tiers = TierMemory(self, config, num_columns=rng.randint(top_k, 2 * top_k), top_k=top_k)

    def launch_in_part(self, plan: StepPlan, part: float) -> None:
        """The device also has so much of the changes of copies and hot buffers, behind the steps in flight."""
        super().launch_in_part(plan, part)
        if self.tiers:
            self._partial.append((self.in_flight[-1].plan.step if self.in_flight else 0, plan, part))
            self._change_in_part()

    def _change_in_part(self) -> None:
        """Make what is left of failed launches behind the last step that was executed."""
        assert self.tiers is not None
        first = self.in_flight[0].plan.step if self.in_flight else math.inf
        while self._partial and self._partial[0][0] < first:
            _, plan, part = self._partial.popleft()
            self.tiers.change(plan, part)

    def execute(self, step: HashStep, *, fails: bool, poisoned: Mapping[int, int]) -> StepResult:
        try:
            return super().execute(step, fails=fails, poisoned=poisoned)
        finally:
            if self.tiers:
                self._change_in_part()

    def _settle(self, plan: StepPlan) -> None:
        super()._settle(plan)
        if self.tiers:
            self.tiers.change(plan)

    def _forward(self, step: HashStep, poisoned: Mapping[int, int]) -> StepResult:
        result = super()._forward(step, poisoned)
        if self.tiers:
            self.tiers.run(step)
            return replace(result, counts={RESIDENT: self.tiers.coordinator.counts.numpy().copy()})
        return result

    def poison_free(self, pending: Iterable[HostCopy | TierCopy]) -> None:
        super().poison_free(pending)
        if self.tiers and not self.in_flight:
            self.tiers.poison_free()


if TYPE_CHECKING:
    _Mixed = Simulation
else:
    _Mixed = object


class Tiered(_Mixed):
    """Mixed into a simulation: the engine's pages have resident copies."""

    make_runner: ClassVar[type[HashRunner]] = TieredRunner
    runner: TieredRunner

    def __init__(self, config: SchedulerConfig, traffic: Any, rng: Random, *args: Any, **others: Any) -> None:
        super().__init__(with_copies(config, Random(str(config))), traffic, rng, *args, **others)
        kinds = self.scheduler.pools.kinds
        if self.runner.tiers:
            self.runner.tiers.residents = next(kind for kind in kinds if isinstance(kind, Residents))


class TieredSimulation(Tiered, Simulation):
    pass


class TieredSleeping(Tiered, SleepingSimulation):
    def _poison(self) -> None:
        super()._poison()
        if self.runner.tiers:
            self.runner.tiers.poison()


class TieredHalf(Tiered, Half):
    pass


def with_copies(config: SchedulerConfig, rng: Random) -> SchedulerConfig:
    """Give one in 1 to 4 pages a copy. A hot buffer has a page for the newest tokens, so a step verifies no more."""
    num_copies = max(1, config.num_pages // rng.randint(1, 4))
    slot_bytes = {**config.kinds.slot_bytes, RESIDENT: 20 * config.page_size}
    kinds = replace(config.kinds, num_slots={**config.kinds.num_slots, RESIDENT: num_copies}, slot_bytes=slot_bytes)
    wide = config.speculation.num_draft_tokens > config.page_size
    return replace(config, kinds=kinds, speculation=SpeculationOptions() if wide else config.speculation)


def run_seed(seed: int) -> TieredOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down(Random(seed).choice([SHARED, admission.SHARE_WORTH_WAITING]), **_times(seed)):
            if seed % 3 == 2:
                pair = random_pair_of(seed, Pair[TieredHalf], TieredHalf)
                pair.run()
                return TieredOutcome.of([pair.prefill.runner, pair.decode.runner])
            return TieredOutcome.of([_run_one(seed)])
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.tiered --seed {seed}")
        raise


def _times(seed: int) -> dict[str, float]:
    return {"expire_interval_s": 1e9} if seed % 3 == 1 else {}


def _run_one(seed: int) -> TieredRunner:
    rng, widths = Random(f"{seed} tiered"), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    traffic = random_traffic(rng, config)
    if seed % 3 == 0:
        sim: Tiered = TieredSimulation(config, traffic, rng, widths=widths)
    else:
        sim = TieredSleeping(config, traffic, rng, widths=widths, chance=0.1, keeps=widths.random() < 0.5)
    sim.run()
    return sim.runner


def run_seeds(seeds: Iterable[int]) -> TieredOutcome:
    return sum(map(run_seed, seeds), TieredOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.tiered", __doc__ or "", run_seed, TieredOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

"""An engine with 2 or 3 ranks: hash runners behind `RankBroadcast`, each with its part of the memory, and slow ranks.

Traffic, faults, sleeps and other weights are those of `sleeping`, and every promise is checked as there: tokens are
those of one runner. Besides, steps and sequences fail on one rank alone, graphs are captured in idle time, and a rank
executes its log as late as it may. All logs must be the same in the end, and no rank may wait for an entry that never
comes.

python -m tests.simulation.ranked --seeds 0:2000 --jobs 2
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

from forebay.base.errors import EngineError
from forebay.base.parts import I64
from forebay.config.engine_config import SchedulerConfig
from forebay.engine.frames import KV_CACHE
from forebay.engine.lifecycle.sleep import NoMemory
from forebay.engine.ranks import follower
from forebay.engine.ranks.broadcast import RankBroadcast, RankMemory
from forebay.engine.ranks.follower import Follower
from forebay.engine.ranks.outcome import Outcome
from forebay.requests.step_plan import Launched, Runner, StepPlan, StepResult
from forebay.scheduler import admission
from forebay.scheduler.proposer import Proposer
from tests.simulation.command_line import command_line
from tests.simulation.faulty_device import CopyStep, Flight
from tests.simulation.hash_runner import HashRunner, StepFailed
from tests.simulation.hash_step import HashStep, Pools
from tests.simulation.hashing import U64, mix_array
from tests.simulation.liveness import require
from tests.simulation.rank_runner import RankRunner, SeenPools, combined
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import SHARED, scaled_down
from tests.simulation.sleeping import Kept, SleepingSimulation, SleepOutcome, kept_of, poison, put_back
from tests.simulation.workload import random_config, random_traffic, with_speculation

if TYPE_CHECKING:
    from forebay.memory.slots import Ids


@dataclass(frozen=True, kw_only=True)
class RankedOutcome(SleepOutcome):
    entries: int = 0  # of the logs
    captures: int = 0
    rank_failures: int = 0  # steps that failed on one rank above 0 alone
    rows_failed: int = 0  # sequences of which a value was not finite on one rank above 0 alone


@dataclass(frozen=True)
class Sampled:
    """What rank 0 spreads in a step: its result and its rows' draft tokens; None if the step failed there."""

    result: StepResult
    drafts: I64


class RankZero(HashRunner):
    """Rank 0's device. The digests that it samples from are those of all ranks."""

    ranks: SimulatedRanks

    def _values(self, step: HashStep, digest: U64) -> U64:
        return mix_array(combined({0: digest, **self.ranks.gather(step.plan.step)}))

    def execute(self, step: HashStep, *, fails: bool, poisoned: Mapping[int, int]) -> StepResult:
        result = super().execute(step, fails=fails, poisoned=poisoned)
        self.ranks.spread[step.plan.step] = Sampled(result, self.draft_tokens.copy())
        return result


class RankZeroRunner:
    """The faulty device as `RankBroadcast` has it. `journal` has what rank 0 does to its device, in order."""

    def __init__(self, sim: RankedSimulation) -> None:
        self._sim, self.journal = sim, list[Any]()

    def launch(self, plan: StepPlan) -> Launched:
        self.journal.append(plan.step)
        try:
            return _Spread(self._sim, plan.step, self._sim.device.launch(plan))
        except StepFailed:
            self._sim.ranks.spread[plan.step] = None
            raise

    def capture_next(self) -> bool:
        self.journal.append("capture")
        self._sim.ranks.meet("capture", self.journal.count("capture"))
        return False


@dataclass(frozen=True)
class _Spread:
    """A step on rank 0: whether it failed is known to the ranks that wait in it."""

    sim: RankedSimulation
    step: int
    flight: Flight

    def result(self) -> StepResult:
        try:
            result = self.flight.result()
        except StepFailed:
            self.sim.ranks.spread[self.step] = None
            raise
        self.sim.ranks.spread.setdefault(self.step, Sampled(result, self.sim.runner.draft_tokens))
        return result


class RankMemoryPart(NoMemory):
    """The memory of one rank above 0."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._kept: Kept | None = None

    def keep(self, places: Mapping[str, Ids]) -> int:
        self._rank.journal.append("keep")
        self._kept = kept_of(self._rank.runner, places)
        return 0

    def release(self, tags: Collection[str]) -> None:
        self._rank.journal.append(("release", *tags))
        if KV_CACHE in tags:
            poison(self._rank.runner)

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        self._rank.journal.append(("resume", *tags))
        if KV_CACHE in tags and self._kept:
            put_back(self._rank.runner, self._kept)
            self._kept = None

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        self._rank.journal.append("update")
        self._kept = None


class RankZeroMemory(NoMemory):
    """Rank 0's memory, which is the simulation's, with a journal."""

    def __init__(self, sim: RankedSimulation) -> None:
        self._sim, self._journal = sim, sim.own.journal

    def keep(self, places: Mapping[str, Ids]) -> int:
        self._journal.append("keep")
        return self._sim.keep(places)

    def release(self, tags: Collection[str]) -> None:
        self._journal.append(("release", *tags))
        self._sim.release(tags)

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        self._journal.append(("resume", *tags))
        self._sim.resume(tags, progress)

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        self._journal.append("update")
        self._sim.update(path, given, progress)


class Rank:
    """A rank above 0, with what has been sent to it and it has not taken yet."""

    def __init__(self, number: int, ranks: SimulatedRanks, runner: RankRunner) -> None:
        self.number, self.ranks, self.runner = number, ranks, runner
        self.journal: list[Any] = []
        self.follower = Follower(number, self, RankMemoryPart(self))
        self.inbox: deque[tuple[bytes, Any]] = deque()
        self.started: deque[int | None] = deque()  # steps, None for other entries
        self.digests: dict[int, U64] = {}
        self.outcomes: deque[tuple[int, Outcome]] = deque()

    def launch(self, plan: StepPlan) -> RankStep:
        self.journal.append(plan.step)
        self.started.append(plan.step)
        with self.ranks.kept():
            return RankStep(self, self.runner.start(plan))

    def capture_next(self) -> bool:
        self.journal.append("capture")
        return False

    def take(self) -> None:
        """Start the next entry."""
        record, snapshot = self.inbox.popleft()
        self.runner.pools.show(snapshot)  # type: ignore[attr-defined]
        before = self.follower.num_started
        steps = len(self.started)
        self.follower.take(record)
        require(self.follower.num_started == before + 1, "an entry was not started")
        if len(self.started) == steps:
            self.started.append(None)

    @property
    def can_land(self) -> bool:
        """Whether the oldest entry can end without rank 0."""
        return bool(self.started) and (self.started[0] is None or self.started[0] in self.ranks.spread)

    def land(self) -> None:
        self.started.popleft()
        self.outcomes.append(self.follower.land())

    def move(self) -> bool:
        """End an entry, or start one; False if this rank can do neither."""
        if self.can_land:
            self.land()
        elif self.inbox:
            self.take()
        else:
            return False
        return True


class RankStep:
    """A step on a rank above 0."""

    def __init__(self, rank: Rank, step: HashStep | CopyStep) -> None:
        self._rank, self._step = rank, step
        rank.ranks.steps[rank.number, step.plan.step] = self
        self._executed = False

    def compute(self) -> U64:
        """Compute this rank's part, for which those of the other ranks wait."""
        assert isinstance(self._step, HashStep)
        self._rank.runner.execute(self._step, fails=False, poisoned={})
        self._executed = True
        return self._rank.runner.digest

    def result(self) -> StepResult:
        """End as the step did on rank 0, or fail on this rank alone."""
        step, ranks, runner = self._step, self._rank.ranks, self._rank.runner
        number = step.plan.step
        sampled = ranks.spread[number]
        ranks.steps.pop((self._rank.number, number))
        if sampled is None:
            runner.discard(step)
        if isinstance(step, CopyStep):
            return step.result()
        assert sampled is not None
        require(self._executed, f"rank {self._rank.number} has no part in step {number}")
        failed = ranks.faults.rows(step)
        with ranks.kept():
            runner.follow(step, sampled.result, sampled.drafts, failed)
        if ranks.faults.fails(step):
            raise StepFailed(f"step {number} failed on rank {self._rank.number}")
        return StepResult(token_ids=[], failed=failed)


class RankFaults:
    """What goes wrong on one rank above 0 alone, by chance. `pending` has by step the rows that must fail."""

    def __init__(self, rng: Random, chance: float) -> None:
        self._rng, self.chance = rng, chance
        self.may_fail: Callable[[], bool] = lambda: True
        self.failed_steps: dict[int, list[int]] = {}  # with the requests they were for
        self.rows_of: dict[int, set[int]] = {}
        self.num_rows = 0

    def fails(self, step: HashStep) -> bool:
        fails = self._rng.random() < self.chance and self.may_fail()
        if fails:
            self.failed_steps[step.plan.step] = step.tenants.tolist()
        return fails

    def rows(self, step: HashStep) -> tuple[int, ...]:
        if not step.plan.num_seqs or self._rng.random() >= self.chance:
            return ()
        i = self._rng.randrange(step.plan.num_seqs)
        self.num_rows += 1
        self.rows_of.setdefault(step.plan.step, set()).add(i)
        return (i,)


class SimulatedRanks:
    """`Ranks` of a simulation: each executes what was sent to it when rank 0 waits for it, or earlier, by chance."""

    def __init__(self, sim: RankedSimulation, num_ranks: int, rng: Random, faults: RankFaults) -> None:
        self._rng, self.faults = rng, faults
        self._eager = [rng.choice([0.0, 0.3, 0.9]) for _ in range(1, num_ranks)]
        self.pools = SeenPools(Pools.of(sim.scheduler.pools))
        self.spread: dict[int, Sampled | None] = {}  # by step
        self.steps: dict[tuple[int, int], RankStep] = {}
        self.num_sent = 0
        self.broken: Exception | None = None
        model = sim.traffic.model(sim.config)
        propose = sim.propose if sim.config.speculation.algorithm.on_device else None
        self.all = [
            Rank(
                number,
                self,
                RankRunner(number, sim.config, self.pools, model, salt=sim.salts.__getitem__, propose=propose),
            )
            for number in range(1, num_ranks)
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the error of a rank that is in another state than it should be: a follower takes it for a step's."""
        try:
            yield
        except Exception as error:
            self.broken = error
            raise

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def send(self, record: bytes, *, limited: bool = True) -> None:
        self.num_sent += 1
        entry = record, self.pools.snapshot()
        for rank, eager in zip(self.all, self._eager, strict=True):
            rank.inbox.append(entry)
            while self._rng.random() < eager and rank.move():
                pass

    def outcomes(self, number: int) -> list[Outcome]:
        found = []
        for rank in self.all:
            while not rank.outcomes or rank.outcomes[-1][0] < number:
                require(rank.move(), f"rank 0 waits for ever for entry {number} on rank {rank.number}")
            while rank.outcomes[0][0] < number:
                rank.outcomes.popleft()
            found.append(rank.outcomes.popleft()[1])
        return found

    def lost(self, error: EngineError) -> NoReturn:
        raise AssertionError(f"the ranks cannot continue: {error}")

    def gather(self, step: int) -> dict[int, U64]:
        """Wait for each rank's part of a step."""
        digests = {}
        for rank in self.all:
            self.check()
            while (rank.number, step) not in self.steps or rank.started[0] != step:
                self.check()
                require(
                    rank.move(), f"rank 0 waits for ever in step {step} for rank {rank.number} in {[*rank.started]}"
                )
            digests[rank.number] = self.steps[rank.number, step].compute()
        return digests

    def meet(self, what: str, count: int) -> None:
        """Wait until each rank does the same."""
        for rank in self.all:
            while rank.journal.count(what) < count:
                require(rank.move(), f"rank 0 waits for ever for the {what} of rank {rank.number}")

    def finish(self) -> None:
        for rank in self.all:
            while rank.move():
                pass
            require(not rank.follower.num_started, f"rank {rank.number} waits for ever in steps {[*rank.started]}")


class RankedSimulation(SleepingSimulation):
    make_runner = RankZero
    num_ranks, rank_rng, rank_chance = 2, Random(0), 0.0

    def _runner_of_core(self) -> Runner:
        assert isinstance(self.runner, RankZero)
        self.rank_faults = RankFaults(self.rank_rng, self.rank_chance)
        self.ranks = self.runner.ranks = SimulatedRanks(self, self.num_ranks, self.rank_rng, self.rank_faults)
        self.rank_faults.may_fail = lambda: self.device.may_fail
        self.own = RankZeroRunner(self)
        self.broadcast = RankBroadcast(self.own, self.ranks)
        return self.broadcast

    def _other_parts(self) -> dict[str, Any]:
        return super()._other_parts() | {"memory": RankMemory(RankZeroMemory(self), self.broadcast)}

    def tick(self) -> bool:
        if self.core.idle and self.rank_rng.random() < 0.2:
            require(not self.broadcast.capture_next(), "there is more to capture")
        return super().tick()

    def failing(self, plan: StepPlan) -> None:
        """A step that failed on another rank makes those in flight void, as one of rank 0 does."""
        if plan.step in self.rank_faults.failed_steps:
            self.device.failed.setdefault(plan.step, self.rank_faults.failed_steps[plan.step])
        super().failing(plan)

    def committing(self, plan: StepPlan, result: StepResult) -> None:
        rows = self.rank_faults.rows_of.pop(plan.step, set())
        require(rows <= {*result.failed}, f"rows {rows} failed on a rank, and {result.failed} did in step {plan.step}")
        super().committing(plan, result)

    def drain(self) -> int:
        self.rank_faults.chance = 0.0
        return super().drain()

    def outcome(self) -> RankedOutcome:
        self.ranks.finish()
        digest = self.broadcast._log.written
        for rank in self.ranks.all:
            require(rank.follower.digest == digest.digest, f"rank {rank.number} has executed another log")
            require(
                rank.journal == self.own.journal, f"rank {rank.number} did {rank.journal}, rank 0 {self.own.journal}"
            )
        return RankedOutcome(
            **vars(super().outcome()),
            entries=digest.num_entries,
            captures=self.own.journal.count("capture"),
            rank_failures=len(self.rank_faults.failed_steps),
            rows_failed=self.rank_faults.num_rows,
        )


def run_seed(seed: int) -> RankedOutcome:
    """As `sleeping`'s."""
    rng, widths, ranks = Random(f"{seed} ranks"), Random(f"{seed} widths"), Random(f"{seed} rank faults")
    config = with_speculation(widths, random_config(rng))
    every, skips = rng.choice([0, 0, 0, 3, 10]), rng.random() < 0.5

    def make_scheduler(asked: SchedulerConfig, proposer: Proposer | None) -> RetractingScheduler:
        return RetractingScheduler(asked, proposer, every=every, skips=skips)

    class Made(RankedSimulation):
        num_ranks, rank_rng, rank_chance = ranks.choice([2, 3]), ranks, ranks.choice([0.0, 0.01, 0.05])

    try:
        with (
            scaled_down(rng.choice([SHARED, admission.SHARE_WORTH_WAITING]), expire_interval_s=1e9),
            patch.object(follower, "log"),
        ):
            load = random_traffic(rng, config)
            chance = rng.choice([0.0, 0.02, 0.1])
            keeps = widths.random() < 0.5
            made = Made(config, load, rng, make_scheduler=make_scheduler, widths=widths, chance=chance, keeps=keeps)
            made.run()
            return made.outcome()
    except Exception as error:
        error.add_note(f"{config}\nreplay: python -m tests.simulation.ranked --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.ranked", __doc__ or "", run_seed, RankedOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

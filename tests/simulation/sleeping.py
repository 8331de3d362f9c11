"""Sleeps, wakes, pauses and other weights at random moments, under the traffic and the faults of the simulator.

What the device's caches hold is poison while they are released; the tokens of each version of the weights are others.

python -m tests.simulation.sleeping --seeds 0:3000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

import numpy as np

from forebay.memory import anchors
from forebay.requests.parts import I64
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.scheduler import admission, halt
from forebay.scheduler.halt import Halt, Mode
from tests.kinds_of import states_of
from tests.simulation.command_line import command_line
from tests.simulation.device_memory import POISON
from tests.simulation.event_log import Outcome
from tests.simulation.hash_runner import NO_TOKEN, HashRunner, StepFailed
from tests.simulation.hashing import U64, salt_of
from tests.simulation.liveness import require
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import CLOSE, FEW, SHARED, Simulation
from tests.simulation.workload import random_config, random_traffic, with_speculation

MODES = (*Mode, Mode.RETRACT)  # which has most to go wrong


@dataclass(frozen=True)
class CopyStep:
    """A step of nobody, which only copies to the host. Nothing is in flight before it, so it does so at once."""

    runner: HashRunner
    plan: StepPlan
    tenants = np.empty(0, dtype=np.int64)

    def __post_init__(self) -> None:
        runner, ids = self.runner, [save.request_id for save in self.plan.host.saves]
        # What has arrived and has run in no step yet has no row on the device.
        lens = [
            int(runner.lengths.kv_lens[runner.row_of[id]]) if id in runner.row_of else runner.arrived[id] for id in ids
        ]
        if runner.windows:
            runner.windows.write_map(self.plan)
        runner.host.save(self.plan, lens, runner.broken)
        runner.host.drop(self.plan)

    def result(self, *, fails: bool = False, poisoned: object = None) -> StepResult:
        if fails:
            self.runner.host.spoil(self.plan)
            raise StepFailed(f"step {self.plan.step} failed")
        return StepResult(token_ids=[])


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What of the prefix cache is in host memory while the device's caches are gone: by kind of cache where it lay, and
    its words."""

    places: dict[str, I64]
    pages: U64
    windows: U64 | None
    states: U64 | None
    lens: I64 | None


@dataclass(frozen=True, kw_only=True)
class SleepOutcome(Outcome):
    sleeps: int = 0
    updates: int = 0
    restarts: int = 0
    kept: int = 0
    dropped: int = 0


class Sleeping:
    """What a `Simulation` does besides, if in its place: it sleeps by `chance`, and `keeps` its prefix cache or not."""

    def __init__(self, *args, **others) -> None:
        super().__init__(*args, **others)
        self.chance, self.keeps, self.sleeps = 0.0, False, Random(0)
        self.kept: Kept | None = None
        self.halt: Halt | None = None
        self.asleep = False
        self.num_sleeps = self.num_updates = self.num_restarts = self.num_kept = self.num_dropped = 0

    def tick(self) -> bool:
        rng, moved = self.sleeps, False
        if self.halt is None and not self.asleep and rng.random() < self.chance:
            self.halt = Halt(self.scheduler, rng.choice(MODES))
            if self.halt.mode is Mode.ABORT:
                for tracked in self.oracles.live.values():
                    tracked.may_stop = True
        elif self.halt is not None and self.halt.done:
            moved, self.halt, self.asleep = True, None, True
            self._rest(self._what())
        elif self.asleep and (rng.random() < 0.3 or not self.chance):
            moved, self.asleep = True, False
            if self.kept:
                self._put_back(self.kept)
            halt.go_on(self.scheduler, self.now)
            self._goes_on()
        self._heard(self.scheduler.take_news())
        return super().tick() or moved or self.halt is not None or self.asleep

    def _what(self) -> str:
        """Is done at the halt."""
        return self.sleeps.choice(["pause", "release", "update", "release and update"])

    def _goes_on(self) -> None:
        """The time in which it slept is no delay."""

    def decide(self, width: int) -> StepPlan | None:
        if self.halt is not None:
            plan = self.halt.plan(self.now, width)
            self._heard(self.scheduler.take_news())
            if plan is not None and not plan.num_seqs:
                self.flights.append((plan, CopyStep(self.runner, plan)))
                return None
            return plan
        return None if self.asleep else super().decide(width)

    def drain(self) -> int:
        self.chance = 0.0
        return super().drain()

    # -- what changes while nothing runs ------------------------------------------------------------------------------

    def _rest(self, what: str) -> None:
        scheduler, runner = self.scheduler, self.runner
        require(not self.flights and not runner.in_flight, "a halt with steps in flight")
        scheduler.audit()
        generations = [slots.generation.copy() for slots, _ in scheduler.held.pools]
        self.num_sleeps += 1
        if "release" in what:
            if self.keeps:
                self._keep()
            else:
                halt.forget_caches(scheduler)
            self._poison()
        if "update" in what:
            self.kept, self.oracles.caches_are_there = None, True
            self.num_updates += 1
            halt.weights_changed(scheduler, scheduler.weight_version + 1)
            self._expect_other_tokens()
        if what != "pause":
            self._check_clear(generations)
        self._heard(scheduler.take_news())

    def _keep(self) -> None:
        scheduler, runner = self.scheduler, self.runner
        before = scheduler.held.cache.num_pages
        places = halt.keep_cached(scheduler)
        num_bytes = sum(len(ids) * self.config.kinds.slot_bytes[kind] for kind, ids in places.items())
        require(num_bytes <= scheduler.held.offloaded.room, f"{num_bytes} bytes of the cache are kept")
        self.kept = Kept(
            places=places,
            pages=runner.pages.by_slot[places["kv"]],
            windows=runner.windows.bytes.by_slot[places["window"]] if runner.windows else None,
            states=runner.states.states[places["state"]] if runner.states else None,
            lens=runner.states.lens[places["state"]] if runner.states else None,
        )
        self.oracles.caches_are_there = False
        self.num_kept += len(places["kv"])
        self.num_dropped += before - len(places["kv"])

    def _put_back(self, kept: Kept) -> None:
        runner, self.kept, self.oracles.caches_are_there = self.runner, None, True
        runner.pages.by_slot[kept.places["kv"]] = kept.pages
        if runner.windows:
            runner.windows.bytes.by_slot[kept.places["window"]] = kept.windows
        if runner.states:
            runner.states.states[kept.places["state"]] = kept.states
            runner.states.lens[kept.places["state"]] = kept.lens

    def _poison(self) -> None:
        """Of what the device has nothing is left."""
        runner = self.runner
        runner.kv[:] = POISON
        runner.table[:] = 0
        for column in (runner.last_tokens, runner.draft_tokens):
            column[:] = NO_TOKEN
        if runner.windows:
            runner.windows.bytes.words[:] = POISON
            runner.windows.full_to_window[:] = 0
        if runner.states:
            runner.states.states[:] = POISON
            runner.states.lens[:] = -1

    def _expect_other_tokens(self) -> None:
        version = self.scheduler.weight_version
        for req in (*self.scheduler.waiting, *self.scheduler.pending):
            tracked = self.oracles.live[req.id]
            self.salts[req.id] = tracked.salt = salt_of(f"{version}/{req.namespace}")
            self.references.add(req.id, tracked.prompt, req.params, salt=tracked.salt)
            self.num_restarts += bool(tracked.received)
            self.runner.cached.pop(req.id, None)
            tracked.begin_again()

    def _check_clear(self, generations: list[np.ndarray]) -> None:
        """C25: everything is as after `clear`, but generations, which grow for ever."""
        held = self.scheduler.held
        for (slots, cached), before in zip(held.pools, generations, strict=True):
            require(slots.num_free + cached == slots.capacity, f"{slots.name} are not all free after a release")
            require(not cached or self.kept is not None, f"{slots.name} are cached after a release")
            require(bool((slots.generation >= before).all()), f"generations of {slots.name} were reset")
        require(not held.rows.req_to_token.any(), "a row maps to pages after a release")
        require(not held.table._block.any(), "a column by row is not zero after a release")
        if states_of(held):
            require(not held.rows._row_slots.any(), "a row maps to a state after a release")


class SleepingSimulation(Sleeping, Simulation):
    def __init__(self, *args, chance: float, keeps: bool, **others) -> None:
        super().__init__(*args, **others)
        self.chance, self.keeps, self.sleeps = chance, keeps, Random(str(self.rng.random()))

    def _goes_on(self) -> None:
        for times in self.oracles.liveness._times.values():
            times.progress = self.now

    def outcome(self) -> SleepOutcome:
        return SleepOutcome(
            **vars(super().outcome()),
            sleeps=self.num_sleeps,
            updates=self.num_updates,
            restarts=self.num_restarts,
            kept=self.num_kept,
            dropped=self.num_dropped,
        )


def run_seed(seed: int, grammars: float = 0.0, restricted: float = 0.0) -> SleepOutcome:
    """As the simulator's. Time-outs are tested elsewhere: what was asleep has all the time."""
    rng, widths = Random(f"{seed} asleep"), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    every, skips = rng.choice([0, 0, 0, 3, 10]), rng.random() < 0.5

    def make_scheduler(asked, proposer) -> RetractingScheduler:
        return RetractingScheduler(asked, proposer, every=every, skips=skips)

    try:
        with (
            patch.object(anchors, "MIN_DISTANCE", CLOSE),
            patch.object(admission, "MAX_OVERTAKES", FEW),
            patch.object(admission, "SHARE_WORTH_WAITING", rng.choice([SHARED, admission.SHARE_WORTH_WAITING])),
        ):
            load = random_traffic(rng, config)
            load = replace(load, grammars=grammars, restricted=restricted)
            load = replace(load, faults=replace(load.faults, expire=0.0))
            chance = rng.choice([0.02, 0.1, 0.3])
            return SleepingSimulation(
                config,
                load,
                rng,
                make_scheduler=make_scheduler,
                widths=widths,
                chance=chance,
                keeps=widths.random() < 0.5,
            ).run()
    except Exception as error:
        error.add_note(f"{config}\nreplay: python -m tests.simulation.sleeping --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.sleeping", __doc__ or "", run_seed, SleepOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

"""Sleeps, wakes, pauses and other weights at random moments, under the traffic and the faults of the simulator.

What the device's caches hold is poison while they are released; the tokens of each version of the weights are others.

python -m tests.simulation.sleeping --seeds 0:3000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from forebay.base.parts import I64
from forebay.config.engine_config import SchedulerConfig
from forebay.engine.frames import KV_CACHE, WEIGHTS, Release, Resume, UpdateWeights
from forebay.engine.lifecycle.sleep import Phase
from forebay.memory.kinds.state.hybrid_rows import HybridReqToTokenPool
from forebay.requests.step_plan import StepPlan
from forebay.scheduler import admission
from forebay.scheduler.halt import Mode
from forebay.scheduler.proposer import Proposer
from tests.kinds_of import states_of
from tests.simulation.command_line import command_line
from tests.simulation.device_memory import POISON
from tests.simulation.event_log import Outcome
from tests.simulation.hash_runner import NO_TOKEN, HashRunner
from tests.simulation.hashing import U64
from tests.simulation.liveness import require
from tests.simulation.oracles import namespace_of
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import SHARED, Simulation, scaled_down
from tests.simulation.workload import random_config, random_traffic, with_keeping, with_speculation

MODES = (*Mode, Mode.RETRACT)  # which has most to go wrong


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What of the prefix cache is in host memory while the device's caches are gone: by kind of cache where it lay, and
    its words."""

    places: dict[str, I64]
    pages: U64
    windows: U64 | None
    states: U64 | None
    lens: I64 | None


def kept_of(runner: HashRunner, places: Mapping[str, I64]) -> Kept:
    return Kept(
        places=dict(places),
        pages=runner.pages.by_slot[places["kv"]],
        windows=runner.windows.bytes.by_slot[places["window"]] if runner.windows else None,
        states=runner.states.states[places["state"]] if runner.states else None,
        lens=runner.states.lens[places["state"]] if runner.states else None,
    )


def put_back(runner: HashRunner, kept: Kept) -> None:
    runner.pages.by_slot[kept.places["kv"]] = kept.pages
    if runner.windows and kept.windows is not None:
        runner.windows.bytes.by_slot[kept.places["window"]] = kept.windows
    if runner.states and kept.states is not None and kept.lens is not None:
        runner.states.states[kept.places["state"]] = kept.states
        runner.states.lens[kept.places["state"]] = kept.lens


def poison(runner: HashRunner) -> None:
    """Of what the device has nothing is left."""
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


@dataclass(frozen=True, kw_only=True)
class SleepOutcome(Outcome):
    sleeps: int = 0
    updates: int = 0
    restarts: int = 0
    kept: int = 0
    retained: int = 0  # prefixes that are kept over a sleep


if TYPE_CHECKING:
    _Mixed = Simulation
else:
    _Mixed = object


class Sleeping(_Mixed):
    """What a `Simulation` does besides, if in its place: it sleeps by `chance`, and `keeps` its prefix cache or not.

    It is the `Memory` of its core's `Sleeper`.
    """

    def __init__(self, *args: Any, chance: float = 0.0, keeps: bool = False, **others: Any) -> None:
        self.chance, self.keeps, self.sleeps = chance, keeps, Random(0)
        super().__init__(*args, **others)
        self.core.sleeper.on_update = self._updated
        self.kept: Kept | None = None
        self.generations = [slots.generation.copy() for slots, _ in self.scheduler.pools.all]
        self.was_away = False
        self.num_asked = self.num_sleeps = self.num_updates = self.num_restarts = self.num_kept = self.num_retained = 0

    def _other_parts(self) -> dict[str, Any]:
        return {"memory": self, "keep_prefix_cache": self.keeps}

    def tick(self) -> bool:
        rng, sleeper, num_asked = self.sleeps, self.core.sleeper, self.num_asked
        was_away = self.was_away = sleeper.away
        if sleeper.phase is Phase.SERVING and rng.random() < self.chance:
            self._halt(rng.choice(MODES))
        elif sleeper.resting and not sleeper.transitions.draining and (rng.random() < 0.3 or not self.chance):
            self._go_on(sleeper.state.released)
        moved = super().tick()
        for serial, failure in sleeper.transitions.take_answers():
            require(failure is None, f"transition {serial} failed with {failure}")
        self._note_going_on()
        return moved or was_away or sleeper.away or self.num_asked > num_asked

    def expire(self, run: Callable[[], None]) -> None:
        """An engine may go on in one turn and look for requests that are late in the next turn of the same tick."""
        self._note_going_on()
        super().expire(run)

    def _note_going_on(self) -> None:
        if self.was_away and not self.core.sleeper.away:
            self.was_away = False
            self._goes_on()

    def planned(self, plan: StepPlan | None, width: int) -> None:
        super().planned(plan, width)
        starts = [admission for admission in plan.admissions if not admission.prebuilt] if plan else []
        require(not (starts and self.core.sleeper.away), f"{starts} start on the way to a halt")

    def _halt(self, mode: Mode) -> None:
        if mode is Mode.ABORT:
            for tracked in self.oracles.live.values():
                tracked.may_stop = True
        what, serial = self._what(), self.num_asked + 1
        if what == "update":
            self._ask(UpdateWeights(serial=serial, path="", mode=mode))
        else:
            tags = {"pause": [], "release": [KV_CACHE], "release and update": [KV_CACHE, WEIGHTS]}[what]
            self._ask(Release(serial=serial, tags=tags, mode=mode))

    def _go_on(self, released: list[str]) -> None:
        """Weights that are gone are not taken again: others are."""
        serial = self.num_asked + 1
        if WEIGHTS in released:
            self._ask(UpdateWeights(serial=serial, path="", mode=Mode.WAIT))
        else:
            self._ask(Resume(serial=serial, tags=released))

    def _ask(self, frame: Release | Resume | UpdateWeights) -> None:
        self.num_asked += 1
        self.core.sleeper.handle(frame)
        self._heard(self.core._take_updates())

    def _what(self) -> str:
        """Is done at the halt."""
        return self.sleeps.choice(["pause", "release", "update", "release and update"])

    def _goes_on(self) -> None:
        """The time in which it slept is no delay."""

    def drain(self) -> int:
        self.chance = 0.0
        return super().drain()

    # -- what it has in memory: `Memory` ------------------------------------------------------------------------------

    def num_bytes(self) -> dict[str, int]:
        return {}

    def check(self, tags: Collection[str]) -> None: ...

    def keep(self, places: Mapping[str, I64]) -> int:
        self._at_rest()
        scheduler, runner = self.scheduler, self.runner
        num_bytes = sum(len(ids) * self.config.kinds.slot_bytes[kind] for kind, ids in places.items())
        require(num_bytes <= scheduler.memory.host_copies.room, f"{num_bytes} bytes of the cache are kept")
        self.kept = kept_of(runner, places)
        self.num_kept += len(places["kv"])
        self.num_retained += len([*scheduler.pools.cache.retention])
        return num_bytes

    def release(self, tags: Collection[str]) -> None:
        self._at_rest()
        self.num_sleeps += 1
        if KV_CACHE in tags:
            self.oracles.caches_are_there = self.kept is None
            retained = [*self.scheduler.pools.cache.retention]
            require(self.kept is not None or not retained, f"{retained} are kept in caches that are gone")
            self._poison()
            self._check_clear()

    def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
        if KV_CACHE in tags and self.kept:
            self._put_back(self.kept)

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        self._at_rest()
        self.kept, self.oracles.caches_are_there = None, True
        self.num_updates += 1

    def _at_rest(self) -> None:
        require(not self.flights and not self.runner.in_flight, "a halt with steps in flight")
        self.scheduler.audit()
        self._heard(self.core._take_updates())

    def _updated(self, path: str | None, version: int) -> None:
        self._expect_other_tokens()
        self._check_clear()

    def _put_back(self, kept: Kept) -> None:
        self.kept, self.oracles.caches_are_there = None, True
        put_back(self.runner, kept)

    def _poison(self) -> None:
        poison(self.runner)

    def _expect_other_tokens(self) -> None:
        for req in (*self.scheduler.queues.waiting, *self.scheduler.queues.pending):
            tracked = self.oracles.live[req.id]
            self.salts[req.id] = tracked.salt = self.oracles.salt(namespace_of(req))
            tracked.rows = self._rows_again(tracked)
            self.references.add(req.id, tracked.prompt, req.params, salt=tracked.salt, rows=tracked.rows)
            self.num_restarts += bool(tracked.received)
            self.runner.cached.pop(req.id, None)
            tracked.begin_again()

    def _check_clear(self) -> None:
        """C25: everything is as after `clear`, but generations, which grow for ever."""
        pools = self.scheduler.pools
        for (slots, cached), before in zip(pools.all, self.generations, strict=True):
            require(slots.num_free + cached == slots.capacity, f"{slots.name} are not all free after a release")
            require(not cached or self.kept is not None, f"{slots.name} are cached after a release")
            require(bool((slots.generation >= before).all()), f"generations of {slots.name} were reset")
        self.generations = [slots.generation.copy() for slots, _ in pools.all]
        require(not pools.rows.req_to_token.any(), "a row maps to pages after a release")
        require(not pools.table._block.any(), "a column by row is not zero after a release")
        if states_of(pools):
            assert isinstance(pools.rows, HybridReqToTokenPool), pools.rows
            require(not pools.rows._row_slots.any(), "a row maps to a state after a release")


class SleepingSimulation(Sleeping, Simulation):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.sleeps = Random(str(self.rng.random()))

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
            retained=self.num_retained,
        )


def run_seed(
    seed: int,
    grammars: float = 0.0,
    restricted: float = 0.0,
    *,
    keeping: bool = False,
    make: type[SleepingSimulation] = SleepingSimulation,
) -> SleepOutcome:
    """As the simulator's. Time-outs are tested elsewhere: what was asleep has all the time."""
    rng, widths = Random(f"{seed} asleep"), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    every, skips = rng.choice([0, 0, 0, 3, 10]), rng.random() < 0.5

    def make_scheduler(asked: SchedulerConfig, proposer: Proposer | None) -> RetractingScheduler:
        return RetractingScheduler(asked, proposer, every=every, skips=skips)

    try:
        with scaled_down(rng.choice([SHARED, admission.SHARE_WORTH_WAITING]), expire_interval_s=1e9):
            load = random_traffic(rng, config)
            load = replace(load, grammars=grammars, restricted=restricted)
            if keeping:
                config, load = with_keeping(Random(f"{seed} keeping"), config, load)
            chance = rng.choice([0.02, 0.1, 0.3])
            outcome = make(
                config,
                load,
                rng,
                make_scheduler=make_scheduler,
                widths=widths,
                chance=chance,
                keeps=widths.random() < 0.5,
            ).run()
            assert isinstance(outcome, SleepOutcome)
            return outcome
    except Exception as error:
        error.add_note(f"{config}\nreplay: python -m tests.simulation.sleeping --seed {seed}")
        raise


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.sleeping", __doc__ or "", run_seed, SleepOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

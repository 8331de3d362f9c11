"""The simulators with adapters that are loaded and unloaded meanwhile: by turns one engine, and one that sleeps.

python -m tests.simulation.adapting --seed 1234              replay one seed
python -m tests.simulation.adapting --seeds 0:5000 --jobs 2
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from forebay.base.errors import ModelError
from forebay.config.engine_config import SchedulerConfig
from forebay.engine.frames import WEIGHTS, LoadAdapter, UnloadAdapter
from forebay.engine.lifecycle.adapters import AdapterMemory
from forebay.memory.adapters import AdapterLoad, Adapters
from forebay.memory.slots import FREE
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import Update
from forebay.scheduler import admission
from tests.simulation.command_line import command_line
from tests.simulation.device_memory import RunnerError
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hash_step import HashStep
from tests.simulation.liveness import require
from tests.simulation.oracles import Tracked
from tests.simulation.simulator import SHARED, Simulation, scaled_down
from tests.simulation.sleeping import Sleeping, SleepingSimulation
from tests.simulation.workload import Traffic, random_config, random_traffic, with_speculation

NAMES: Final = ("a", "b", "c", "d")
PATHS: Final = ("x", "y", "z")
BROKEN: Final = "broken"  # a path whose files cannot be read
COPIES: Final = 3  # pairs of tensors of an adapter


@dataclass(frozen=True, kw_only=True)
class AdaptingOutcome:
    """Sums over seeds: loads that ended well and badly, unloads, and requests with an adapter."""

    seeds: int = 1
    steps: int = 0
    loads: int = 0
    refused: int = 0
    unloads: int = 0
    lost: int = 0
    adapted: int = 0
    digest: str = ""

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        both = f"{self.digest}{other.digest}"
        return type(self)(**sums, digest=hashlib.sha256(both.encode()).hexdigest()[:8])


@dataclass(frozen=True)
class Files:
    """What a load has read: a path as it is now."""

    digest: str
    rank: int = 1
    num_bytes: int = 1


class FakeMemory(AdapterMemory):
    """The slots of a device: `content` is the digest of what each holds, "" where that is nothing whole, of which there
    are so many `parts`."""

    def __init__(self, num_slots: int) -> None:
        self.content = [""] * (num_slots + 1)
        self.parts = [0] * (num_slots + 1)
        self.edits = dict.fromkeys(PATHS, 0)

    def forget(self) -> None:
        """Nothing is left in any slot."""
        self.content = [""] * len(self.content)
        self.parts = [0] * len(self.parts)

    def read(self, path: str) -> Files:
        if path == BROKEN:
            raise ModelError(f"{path}: there is nothing")
        return Files(hashlib.sha256(f"{path} {self.edits[path]}".encode()).hexdigest())

    def holds(self, slot: int) -> bool:
        return self.parts[slot] > 0

    def write(self, slot: int, files: Any) -> Iterator[None]:
        self.content[slot], self.parts[slot] = "", 0
        for _ in range(COPIES):
            self.parts[slot] += 1
            if self.parts[slot] == COPIES:
                self.content[slot] = files.digest
            yield


class AdapterRunner(HashRunner):
    """A hash runner whose rows have slots of adapters: each must hold what the request of the row named, in each step
    that computes for it."""

    memory: FakeMemory
    wanted: dict[int, str]  # by request: the digest of its adapter

    def __init__(self, config: SchedulerConfig, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        self.slots = [0] * len(self.tenant)

    def _settle(self, plan: StepPlan) -> None:
        super()._settle(plan)
        for each in plan.admissions:
            self.slots[each.row] = each.adapter

    def _forward(self, step: HashStep, poisoned: Mapping[int, int]) -> StepResult:
        for row, tenant in zip(step.plan.rows.tolist(), step.tenants.tolist(), strict=True):
            slot = self.slots[row]
            holds, wanted = self.memory.content[slot] if slot else "", self.wanted.get(tenant, "")
            if holds != wanted:
                raise RunnerError(
                    f"step {step.plan.step}: request {tenant} computes with slot {slot}, which holds {holds!r}; it "
                    f"named {wanted!r}"
                )
        return super()._forward(step, poisoned)


if TYPE_CHECKING:
    _Mixed = Simulation
else:
    _Mixed = object


class Adapting(_Mixed):
    """Mixed into a simulation: adapters come and go, and requests name them."""

    make_runner: ClassVar[type[HashRunner]] = AdapterRunner
    runner: AdapterRunner

    def __init__(self, config: SchedulerConfig, traffic: Traffic, rng: Random, *args: Any, **others: Any) -> None:
        self.dice = Random(str(config))
        config = replace(config, max_loras=self.dice.randint(1, 3))
        self.adapter_memory = FakeMemory(config.max_loras)
        super().__init__(config, traffic, rng, *args, **others)
        assert self.core.adapters is not None, "the core has a memory of adapters"
        self.loader = self.core.adapters
        self.runner.memory, self.runner.wanted = self.adapter_memory, {}
        self.later: list[Callable[[], None]] = []  # what threads have yet to do
        self.loader.beside = self.later.append
        self.waits_for: dict[int, LoadAdapter | UnloadAdapter] = {}  # by serial: a frame without an answer
        self.num_frames = self.num_adapted = 0
        self.asks = True
        self.counts = {"loads": 0, "refused": 0, "unloads": 0, "lost": 0}

    def _other_parts(self) -> dict[str, Any]:
        return {**super()._other_parts(), "adapters": self.adapter_memory}

    @property
    def registry(self) -> Adapters:
        return self.scheduler.pools.adapters

    def _adapter(self) -> AdapterLoad | None:
        there = self.registry.accepting
        return self.dice.choice(there) if there and self.dice.random() < 0.7 else None

    def add(self, *args: Any, **others: Any) -> Tracked | None:
        tracked = super().add(*args, **others)
        self.note_adapter()
        return tracked

    def note_adapter(self) -> None:
        """Note the adapter of the latest request, if it was admitted and names one."""
        req = self.scheduler.requests.get(self.num_added)
        if req is not None and req.adapter is not None:
            self.runner.wanted[req.id] = req.adapter.digest
            self.num_adapted += 1

    def tick(self) -> bool:
        if self.asks and self.dice.random() < 0.15:
            self._ask_something()
        if self.later and self.dice.random() < 0.5:
            self.later.pop(self.dice.randrange(len(self.later)))()
        moved = super().tick()
        self.loader.advance()
        self._hear_answers()
        for slot in (self.registry.slots.owner <= FREE).nonzero()[0].tolist():
            self.adapter_memory.content[slot], self.adapter_memory.parts[slot] = "", 0
        return moved

    def _heard(self, updates: list[Update]) -> None:
        lost = [update for update in updates if update.failure and update.failure.code == "adapter_lost"]
        self.counts["lost"] += len(lost)
        super()._heard(updates)

    def _ask_something(self) -> None:
        self.num_frames += 1
        name, serial = self.dice.choice(NAMES), self.num_frames
        if self.dice.random() < 0.6:
            path = BROKEN if self.dice.random() < 0.1 else self.dice.choice(PATHS)
            self.ask_for(LoadAdapter(serial=serial, name=name, path=path, replace=self.dice.random() < 0.4))
        else:
            self.ask_for(UnloadAdapter(serial=serial, name=name, timeout_s=self.dice.choice([0.0, 0.2, 1e9])))

    def ask_for(self, frame: LoadAdapter | UnloadAdapter) -> None:
        self.waits_for[frame.serial] = frame
        self.loader.handle(frame)

    def _hear_answers(self) -> None:
        for serial, failure in self.loader.take_answers():
            frame = self.waits_for.pop(serial)
            known = {"adapter_loaded", "adapter_loading", "adapter_slots_taken", "invalid_adapter", "model_not_found"}
            known |= {"adapter_unloaded"}
            require(failure is None or failure.code in {*known, "adapter_draining"}, f"{frame} ended with {failure}")
            if failure is None and isinstance(frame, LoadAdapter):
                require(frame.path != BROKEN, f"{frame} ended well")
            kind = "refused" if failure else "loads" if isinstance(frame, LoadAdapter) else "unloads"
            self.counts[kind] += 1

    def drain(self) -> int:
        self.ask_no_more()
        steps = super().drain()
        self.check_empty()
        return steps

    def ask_no_more(self) -> None:
        """From here on adapters neither come nor go; what was asked for is done."""
        self.asks = False
        for work in self.later:
            work()
        self.later.clear()

    def check_empty(self) -> None:
        """Nobody runs: every adapter can be unloaded, and every slot is free then."""
        for adapter in self.registry.accepting:
            self.registry.unload(adapter.name)
        for _ in range(COPIES * len(self.adapter_memory.content) + 1):
            self.loader.advance()
        for adapter in [*self.registry]:
            self.registry.unload(adapter.name)
        self.loader.advance()
        self._hear_answers()
        slots = self.registry.slots
        require(slots.num_free == slots.capacity, f"{slots.capacity - slots.num_free} slots of adapters are lost")
        require(not self.waits_for, f"{self.waits_for} were never answered")
        self.registry.audit({})


class AdaptingSimulation(Adapting, Simulation):
    pass


class Forgetting(Adapting, Sleeping):
    """Mixed into what sleeps: while weights are released the slots hold nothing. Files may be edited, and are then
    lost."""

    def release(self, tags: Collection[str]) -> None:
        super().release(tags)
        if WEIGHTS in tags:
            self._forget()
            if self.dice.random() < 0.3:
                self.adapter_memory.edits[self.dice.choice(PATHS)] += 1

    def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
        super().update(path, given, progress)
        self._forget()

    def _forget(self) -> None:
        """Nothing is left in the slots; who has an adapter of edited files may lose it."""
        self.adapter_memory.forget()
        for req in self.scheduler.requests.values():
            if req.adapter and req.adapter.digest:
                self.oracles.live[req.id].may_lose_adapter = True


class AdaptingSleeping(Forgetting, SleepingSimulation):
    def check_empty(self) -> None:
        """Loads wait while the engine sleeps, and without requests nothing has woken it."""
        while self.core.sleeper.away:
            self.tick()
        super().check_empty()


def run_seed(seed: int) -> AdaptingOutcome:
    """Whatever is wrong is raised, with the line that replays it."""
    try:
        with scaled_down(Random(seed).choice([SHARED, admission.SHARE_WORTH_WAITING]), **_times(seed)):
            sim = random_simulation(seed)
            sim.run()
            return AdaptingOutcome(
                steps=sim.num_steps, adapted=sim.num_adapted, digest=str(sim.outcome()), **sim.counts
            )
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.adapting --seed {seed}")
        raise


def _times(seed: int) -> dict[str, float]:
    return {"expire_interval_s": 1e9} if seed % 2 else {}


def random_simulation(seed: int) -> AdaptingSimulation | AdaptingSleeping:
    """Return the simulation of a seed."""
    rng, widths = Random(f"{seed} adapting"), Random(f"{seed} widths")
    config = with_speculation(widths, random_config(rng))
    traffic = random_traffic(rng, config)
    if seed % 2:
        return AdaptingSleeping(config, traffic, rng, widths=widths, chance=0.1, keeps=widths.random() < 0.5)
    return AdaptingSimulation(config, traffic, rng, widths=widths)


def run_seeds(seeds: Iterable[int]) -> AdaptingOutcome:
    return sum(map(run_seed, seeds), AdaptingOutcome(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    return command_line("tests.simulation.adapting", __doc__ or "", run_seed, AdaptingOutcome(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

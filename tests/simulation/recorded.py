"""Simulations that are recorded, and replayed by schedulers of their own: the plans are the same.

python -m tests.simulation.recorded --seeds 0:500 --jobs 1
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self
from unittest.mock import patch

from forebay.config.engine_config import DisaggregationMode
from forebay.engine.recorder.hidden import Hidden
from forebay.engine.recorder.mark import Marks
from forebay.engine.recorder.recorder import Recorder, decode_all, origin_of
from forebay.engine.recorder.replay import Outcome, Replay
from forebay.memory import pictures as memory
from forebay.memory.adapters import AdapterChanged
from forebay.scheduler import admission
from forebay.scheduler.journal import Added, Halted, Marked, Origin, Planned, Record, Transferred
from tests.simulation import adapting, adapting_pair, pair, pictures, showing_pair, simulator, sleeping
from tests.simulation.command_line import command_line
from tests.simulation.liveness import require
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import Simulation
from tests.simulation.sleeping import SleepingSimulation

SECRET = b"a key for a test"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Plans that a replay repeated, and what was around them."""

    seeds: int = 1
    plans: int = 0
    retractions: int = 0
    failures: int = 0
    overlapped: int = 0
    halts: int = 0
    transfers: int = 0
    pictures: int = 0
    pictures_of_pairs: int = 0
    adapted: int = 0
    adapters: int = 0
    marks: int = 0
    digest: str = ""  # of the plans

    @property
    def steps(self) -> int:
        return self.plans

    def __add__(self, other: Self) -> Self:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "digest"}
        both = f"{self.digest}{other.digest}"
        return type(self)(**sums, digest=hashlib.sha256(both.encode()).hexdigest()[:8])


class Recording:
    """A simulation `sim` whose scheduler is recorded. Faults that change pools behind the scheduler's back are left
    out."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        sim.faults = replace(sim.faults, windows_lost=0.0)
        sim.restarts = 0.0
        self.data: list[bytes] = []
        self.every, self.skips = sim.scheduler.every, sim.scheduler.skips
        self.calm_from = 1 << 60  # the number of the first record with which it retracts no more than it must
        self.share = admission.SHARE_WORTH_WAITING
        self.end_of_ids = pictures.end_of_ids(sim) if sim.config.pictures else memory.END_OF_IDS
        self.origin = origin_of(sim.scheduler)
        self.replayed = Replayed(seeds=0)
        self._drain, self._arrive = sim.drain, sim.arrive
        sim.drain, sim.arrive = self.drain, self.arrive
        self.marks: dict[int, dict[str, Any]] = {}  # by number of the record, what the simulation knows besides
        sim.scheduler.queues.journal = Recorder(self.append, Marks(sim.scheduler), most_bytes=1 << 20)

    def append(self, record: bytes, before: bytes | None = None, /) -> None:
        """Keep a record and the one before it."""
        self.data += [record] if before is None else [before, record]

    def arrive(self) -> None:
        """Let an idle engine look for leaks before the next request, which marks its state."""
        preemption, number = self.sim.scheduler.preemption, len(self.data)
        if self.sim.scheduler.idle:
            self.sim.scheduler.reclaim_leaks()
        if any(isinstance(record, Marked) for record in decode_all(self.data[number:])):
            self.marks[number] = {"_num_plans": preemption._num_plans, "_due": preemption._due}
        self._arrive()

    def calm(self) -> None:
        """Note that it retracts no more than it must from now on."""
        self.calm_from = min(self.calm_from, len(self.data))

    def drain(self) -> Any:
        self.calm()
        return self._drain()

    def run(self) -> Any:
        """Run the simulation, and replay it."""
        with patch.object(memory, "END_OF_IDS", self.end_of_ids):
            outcome = self.sim.run()
        self.replayed = replayed(self)
        return outcome


def recorded_pair(both: Any) -> list[Recording]:
    """Run two engines with a role, and replay each of them."""
    both.recovers = 0.0  # which damages the ledger behind the scheduler's back
    halves, drain = [Recording(both.prefill), Recording(both.decode)], both.drain

    def calmed() -> None:
        for half in halves:
            half.calm()
        drain()

    both.drain = calmed
    both.run()
    for half in halves:
        half.end_of_ids = memory.END_OF_IDS  # with which both ran
        half.replayed = replayed(half)
    return halves


def replay_of(
    recording: Recording, records: Sequence[Record], mark: int | None = None, origin: Origin | None = None
) -> Outcome:
    """Replay records by a scheduler that retracts as often as that of the simulation, all of them or those behind the
    one with number `mark`."""

    def make(*parts: Any) -> RetractingScheduler:
        made.append(RetractingScheduler(*parts, every=recording.every, skips=recording.skips))
        return made[-1]

    def observe(number: int) -> None:
        if number + (mark or 0) >= recording.calm_from:
            made[-1].every = 0

    made: list[RetractingScheduler] = []
    with simulator.scaled_down(recording.share), patch.object(memory, "END_OF_IDS", recording.end_of_ids):
        replay = Replay(
            origin=origin or recording.origin,
            records=records[mark:],
            begins_at_mark=mark is not None,
            make_scheduler=make,
            observe=observe,
        )
        if mark is not None:
            vars(made[-1].preemption).update(recording.marks[mark])
        return replay.run()


def replayed(recording: Recording) -> Replayed:
    """Replay a simulation with its tokens and without them; each plan must be the same."""
    records = decode_all(recording.data)
    hiding = Hidden(recording.origin, SECRET)
    for its, origin in ((records, recording.origin), ([*hiding.all(records)], hiding.origin)):
        outcome = replay_of(recording, its, origin=origin)
        require(outcome.difference is None, f"{'with tokens' if its is records else 'hidden'}: {outcome}")
        require(not outcome.ended, outcome.ended)
        for at in {*[*recording.marks][:1], *[*recording.marks][-1:]}:
            behind = replay_of(recording, its, at, origin)
            require(behind.difference is None and not behind.ended, f"behind record {at}: {behind}")
    sim = recording.sim
    shown = sum(len(record.pictures) for record in records if isinstance(record, Added))
    counters = sim.scheduler.counters
    return Replayed(
        plans=outcome.num_plans,
        retractions=int(counters["retractions"]),
        failures=int(counters["failed_steps"] + counters["recoveries"]),
        overlapped=outcome.num_plans if sim.config.overlap_depth else 0,
        halts=sum(isinstance(record, Halted) for record in records),
        transfers=sum(isinstance(record, Transferred) for record in records),
        pictures=shown,
        pictures_of_pairs=0 if sim.config.disaggregation.mode is DisaggregationMode.NULL else shown,
        adapted=sum(bool(record.adapter) for record in records if isinstance(record, Added)),
        adapters=sum(isinstance(record, AdapterChanged) for record in records),
        marks=len(recording.marks),
        digest=hashlib.sha256(repr([record for record in records if isinstance(record, Planned)]).encode()).hexdigest(),
    )


def record_seed(seed: int) -> list[Recording]:
    """Run one seed of the simulator, of its sleeping engine, of a pair, of pictures or of adapters, in turn, and return
    the recorded runs. Pairs have pictures, adapters, or neither."""
    made: list[Recording] = []

    def noted(kind: type) -> Any:
        def make(*args: Any, **others: Any) -> Recording:
            made.append(Recording(kind(*args, **others)))
            return made[-1]

        return make

    match seed % 5:
        case 0:
            tenants, tiers, keeping = seed % 2 == 0, seed % 4 == 0, seed % 3 == 0
            made_by = noted(Simulation)
            simulator.run_seed(seed, 0.3, tenants=tenants, tiers=tiers, keeping=keeping, make=made_by)
        case 1:
            sleeping.run_seed(seed, 0.2, keeping=seed % 2 == 0, make=noted(SleepingSimulation))
        case 2:
            with simulator.scaled_down():
                made += recorded_pair(_random_pair(seed))
        case kind:
            make = pictures.random_simulation if kind == 3 else adapting.random_simulation
            with simulator.scaled_down(expire_interval_s=1e9 if seed % 2 else simulator.EXPIRE_INTERVAL_S):
                made.append(Recording(make(seed)))
                made[-1].run()
    return made


def _random_pair(seed: int) -> Any:
    if seed % 3 == 1:
        return showing_pair.random_showing_pair(seed)
    return adapting_pair.random_adapting_pair(seed) if seed % 4 > 1 else pair.random_pair(seed)


def run_seed(seed: int) -> Replayed:
    """Record and replay one seed."""
    return sum((run.replayed for run in record_seed(seed)), Replayed(seeds=0))


def main(argv: Sequence[str] | None = None) -> int:
    run: Callable[[int], Replayed] = run_seed
    return command_line("tests.simulation.recorded", __doc__ or "", run, Replayed(seeds=0), argv)


if __name__ == "__main__":
    sys.exit(main())

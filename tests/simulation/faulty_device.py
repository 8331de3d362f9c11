"""The hash runner as an engine core sees it, with the faults that a simulation injects."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from forebay.engine.loop.core import MAX_FAILURES_IN_A_ROW
from forebay.memory.slots import CACHE
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan, StepResult
from tests.simulation.hash_runner import HashRunner, StepFailed
from tests.simulation.hash_step import HashStep

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulation

_NOTHING: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Disturbance:
    """An error between two steps (`hear`), before or behind a decision (`plan`, `planned`), or before a commit."""

    at: str
    culprit: Request | None


@dataclass(frozen=True)
class CopyStep:
    """A step of nobody, which only copies. Where it copies requests to the host nothing is in flight before it."""

    runner: HashRunner
    plan: StepPlan
    tenants = np.empty(0, dtype=np.int64)

    def __post_init__(self) -> None:
        runner = self.runner
        runner._write_table(self.plan)
        if runner.windows:
            runner.windows.write_map(self.plan)

    def _copy(self) -> tuple[int, ...]:
        runner, ids = self.runner, [save.request_id for save in self.plan.host.saves]
        # What has arrived and has run in no step yet has no row on the device.
        lens = [
            int(runner.lengths.kv_lens[runner.row_of[id]]) if id in runner.row_of else runner.arrived[id] for id in ids
        ]
        runner.forget_pictures(self.plan)
        runner.host.save(self.plan, lens, runner.broken)
        lost = runner.cache_tiers.store(self.plan)
        runner.host.drop(self.plan)
        return lost + runner.cache_tiers.fetch(self.plan)

    def result(self, *, fails: bool = False, poisoned: object = None) -> StepResult:
        if fails:
            self.runner.host.spoil(self.plan)
            self.runner.cache_tiers.spoil(self.plan)
            raise StepFailed(f"step {self.plan.step} failed")
        return StepResult(token_ids=[], lost=self._copy())


class Flight:
    """`Launched`: a step on its way. It fails if it is `void`: an earlier one has failed, or its engine has."""

    def __init__(self, device: FaultyDevice, plan: StepPlan, step: HashStep | CopyStep) -> None:
        self.plan, self.step, self.is_void = plan, step, False
        self._device = device

    def result(self) -> StepResult:
        return self._device.land(self)


class FaultyDevice:
    """`Runner` of a `Simulation`. `failed` has, by number, the steps that failed, and the requests they were for."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.flights: deque[Flight] = deque()
        self.failed: dict[int, list[int]] = {}
        self.landed: HashStep | CopyStep | None = None
        self.result: StepResult | None = None  # of the last that did not fail
        self.poisoned: Mapping[int, int] | None = None  # of the next step that lands, where a test says so
        self.num_failures = 0  # since the last commit
        self.num_done = 0  # launches, landings, and disturbances

    @property
    def may_fail(self) -> bool:
        """Whether one failure more does not end the engine."""
        return self.num_failures < MAX_FAILURES_IN_A_ROW - 1

    def void(self) -> None:
        """What is in flight counts for nothing, and may have left anything behind."""
        for flight in self.flights:
            flight.is_void = True

    # -- launching ----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Flight:
        sim, runner = self._sim, self._sim.runner
        self.num_done += 1
        if not (plan.num_seqs or plan.pictures.encodes):
            step: HashStep | CopyStep = CopyStep(runner, plan)
        elif sim.rng.random() < self._chance_of_failure(plan) and self.may_fail:
            self._launch_in_part(plan)
        else:
            step = runner.launch(plan)
        self.flights.append(Flight(self, plan, step))
        return self.flights[-1]

    def _chance_of_failure(self, plan: StepPlan) -> float:
        """Greater where the plan carries writes that those who live on rely on: to rows of others than it computes for,
        or to windows of cached pages."""
        chance = self._sim.faults.launch_fails
        if not chance or not (len(plan.writes.write_rows) or len(plan.kinds.window.map_pages)):
            return chance
        owner = self._sim.scheduler.pools.kv.owner
        others = (
            np.isin(plan.writes.write_rows, plan.rows, invert=True).any()
            or (owner[plan.kinds.window.map_pages] == CACHE).any()
        )
        return max(chance, 0.8) if others else chance

    def _launch_in_part(self, plan: StepPlan) -> None:
        runner = self._sim.runner
        runner.launch_in_part(plan, self._sim.rng.random())
        self.never_launched(plan)
        ids = [int(runner.tenant[row]) for row in plan.rows.tolist()]
        self._fails(plan, ids + [admission.request_id for admission in plan.admissions])

    def never_launched(self, plan: StepPlan) -> None:
        """Of those that would have started with it the first start is known, which their reports are about."""
        for admission in [admission for admission in plan.admissions if not admission.prebuilt]:
            at = plan.rows[: plan.num_extends] == admission.row
            self._sim.runner.cached.setdefault(admission.request_id, int(plan.starts[at][0]))

    def _fails(self, plan: StepPlan, request_ids: list[int]) -> NoReturn:
        self.failed[plan.step] = request_ids
        raise StepFailed(f"step {plan.step} failed")

    # -- landing ------------------------------------------------------------------------------------------------------

    def land(self, flight: Flight) -> StepResult:
        sim, step = self._sim, flight.step
        assert self.flights.popleft() is flight, "steps end in another order than they were launched in"
        self.num_done += 1
        if not flight.is_void:
            sim.runner.check_in_flight()
        poisoned = self._take_poison(flight.plan)
        fails = flight.is_void or (sim.rng.random() < self._chance_to_land_badly(step) and self.may_fail)
        self.landed = step
        try:
            self.result = step.result(fails=fails, poisoned=poisoned)
            return self.result
        except StepFailed:
            if flight.is_void:
                raise
            self.void()
            self._fails(flight.plan, step.tenants.tolist())

    def _take_poison(self, plan: StepPlan) -> Mapping[int, int]:
        """By sequence the first of its tokens for which something is not finite: ten times as often where drafts are
        verified, since few steps do and it may come behind a token there."""
        sim, (poisoned, self.poisoned) = self._sim, (self.poisoned, None)
        chance = sim.faults.not_finite * (10 if plan.width > 1 else 1)
        if poisoned is None and plan.num_seqs and sim.rng.random() < chance:
            i = sim.rng.randrange(plan.num_seqs)
            poisoned = {i: sim.choices.randrange(int(plan.q_lens[i]))}
        return poisoned or _NOTHING

    def _chance_to_land_badly(self, step: HashStep | CopyStep) -> float:
        requests = map(self._sim.scheduler.requests.get, step.tenants.tolist())
        left = any(req and req.status is Status.WAITING for req in requests)  # retracted while it was computed for
        return self._sim.faults.result_fails * (4 if left else 1)

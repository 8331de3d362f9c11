"""Simulations for tests that say themselves what happens, and the kinds of models that they are run with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from forebay.config.engine_config import Ledger, SchedulerConfig, SpeculativeAlgorithm, StateStrategy
from forebay.memory.kinds.state.hybrid_rows import tracking_slots
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from tests.kinds_of import kind_config, num_states, resized
from tests.simulation.hash_runner import StepFailed
from tests.simulation.oracles import Tracked
from tests.simulation.proposers import RandomWidths
from tests.simulation.retracting import RetractingScheduler
from tests.simulation.simulator import SchedulerFactory, Simulation
from tests.simulation.workload import Traffic, speculating

HYBRIDS = ("extra_buffer", "no_buffer", "windows", "both")
WINDOW = 6


def config(**changes: Any) -> SchedulerConfig:
    asked = SchedulerConfig(
        page_size=4,
        num_pages=32,
        max_running_requests=8,
        context_length=128,
        chunked_prefill_size=16,
        max_queued_requests=1 << 20,
        ledger=Ledger.RAISE,
    )
    return replace(asked, **changes)


def traffic(**changes: Any) -> Traffic:
    asked = Traffic(num_requests=0, arrivals=1.0, vocab=1000, longest_prompt=24, longest_output=16, stopping=0.0)
    return replace(asked, **changes)


class Scripted(Simulation):
    """Launches and lands one by one, as a test says, besides whole turns."""

    width: int | None = None  # of every step; None for a random one

    def accept(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Tracked:
        """Add a request that must not be refused."""
        tracked = self.add(prompt, params, **options)
        assert tracked is not None, "the request was refused"
        return tracked

    def launched(self) -> StepPlan:
        """As `launch`, if there must be a step."""
        plan = self.launch()
        assert plan is not None, "no step could be planned"
        return plan

    def launch(self) -> StepPlan | None:
        """Plan a step and launch it, whatever is in flight."""
        width = self.width or (self.widths.width(1) if self.widths else 1)
        plan = self.scheduler.plan(self.now, width)
        if plan is not None:
            self.core._launch(plan, width, self.core._expect(plan))
        self._heard(self.core._take_updates())
        return plan

    def land(self, poisoned: Mapping[int, int] | None = None) -> StepResult | None:
        """Commit the oldest step; what it brought. None if it failed."""
        self.device.poisoned, self.device.result = poisoned, None
        self.core._land()
        self._heard(self.core._take_updates())
        return self.device.result

    def fail(self) -> None:
        """The oldest step fails, although it has not run."""
        flight = self.flights.popleft()
        self.runner.in_flight.clear()
        self.core._in_flight.clear()
        self.device.failed[flight.plan.step] = flight.step.tenants.tolist()
        self.core._fail(flight.plan, StepFailed("injected"))
        self._heard(self.core._take_updates())


def simulation(
    seed: int = 0,
    *,
    make_scheduler: SchedulerFactory = RetractingScheduler,
    load: Traffic | None = None,
    **changes: Any,
) -> Scripted:
    return simulation_of(config(**changes), seed, make_scheduler=make_scheduler, load=load)


def simulation_of(
    asked: SchedulerConfig,
    seed: int = 0,
    *,
    make_scheduler: SchedulerFactory = RetractingScheduler,
    load: Traffic | None = None,
) -> Scripted:
    return Scripted(asked, load or traffic(), Random(seed), make_scheduler=make_scheduler)


def wide(asked: SchedulerConfig, proposed_on: str, width: int = 4, **changes: Any) -> Scripted:
    """Decodes as wide as they can be, whose drafts are all right."""
    algorithm = {"host": SpeculativeAlgorithm.NGRAM, "device": SpeculativeAlgorithm.EAGLE}[proposed_on]
    sim = simulation_of(speculating(asked, algorithm, width), **changes)
    assert isinstance(sim.widths, RandomWidths)
    sim.width = sim.widths.fixed = width
    sim.propose.right = width
    if sim.proposer:
        sim.proposer.shy, sim.proposer.made_up = 0.0, 1.0
    return sim


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def hybrid(
    kind: str,
    *,
    page_size: int = 4,
    num_tokens: int = 128,
    spare_slots: int = 12,
    spare_windows: int = 12,
    host: bool = False,
    **changes: Any,
) -> SchedulerConfig:
    """A model with states (by either strategy), windows, or both; without an extra buffer pages hold one token."""
    ps = 1 if kind == "no_buffer" else page_size
    wanted = config(page_size=ps, num_pages=num_tokens // ps, **changes)
    depth, rows = wanted.overlap_depth, wanted.max_running_requests
    strategy = StateStrategy.NO_BUFFER if kind == "no_buffer" else StateStrategy.EXTRA_BUFFER
    state = kind_config(
        strategy=strategy, track_interval=2 * ps, slot_bytes={"kv": 100 * ps, "window": 50 * ps, "state": 1000}
    )
    if host:
        state = replace(state, retraction_host_bytes=1 << 30, recompute_bytes_per_token=1 << 20)
    if kind != "windows":
        per_request = 1 + tracking_slots(strategy is StateStrategy.EXTRA_BUFFER, depth)
        state = resized(state, num_slots=rows * per_request + spare_slots)
    if kind in ("windows", "both"):
        tracked = state.track_interval if num_states(state) else 0
        pages = rows * window_pages_per_request(WINDOW, ps, depth, tracked)
        pages += window_pages_in_flight(wanted.chunked_prefill_size, ps, depth)
        state = resized(state, window=WINDOW, num_window_pages=pages + spare_windows)
    return replace(wanted, kinds=state)

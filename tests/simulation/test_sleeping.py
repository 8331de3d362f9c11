"""Sleeps and updates of weights at random moments, and bugs put there on purpose: what must be found, soon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from forebay.engine.lifecycle import sleep
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.slots import Slots
from forebay.requests.request import Request
from forebay.requests.transfers import Offered
from forebay.scheduler.halt import Halt, Mode
from forebay.scheduler.handoff import Role
from forebay.scheduler.matches import Matches
from forebay.scheduler.memory.engine_memory import EngineMemory
from forebay.scheduler.memory.host_copies import HostCopies
from forebay.scheduler.scheduler import Scheduler
from tests.simulation.bugs import Mutations, Patch
from tests.simulation.sleeping import SleepingSimulation, SleepOutcome, run_seed
from tests.simulation.sleeping_pair import SleepingHalf, SleepingPairOutcome
from tests.simulation.sleeping_pair import run_seed as run_pair

PER_CHUNK, PAIRS_PER_CHUNK = 15, 15
BUSY_PAIRS = range(6, 10)  # that sleep and take other weights
SLOW = [pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 200)]
SLOW_PAIRS = [
    pytest.param(range(first, first + PAIRS_PER_CHUNK), marks=pytest.mark.slow)
    for first in range(0, 120 * PAIRS_PER_CHUNK, PAIRS_PER_CHUNK)
]
PER_MUTATION = 80  # seeds, and each is found sooner
FOUND_AT = {  # looked at first
    "a_host_copy_of_an_old_version_is_loaded": 7,
    "memory_is_released_while_a_peer_may_touch_it": 30,
    "memory_is_released_before_steps_in_flight_have_landed": 7,
    "requests_that_waited_through_a_release_wait_for_a_step_that_never_comes": 10,
    "what_one_version_computes_is_decoded_by_another": 6,
    "who_goes_on_under_new_weights_keeps_its_tokens": 6,
    "who_waits_with_an_open_ticket_waits_for_ever": 79,
}

MUTATIONS, OF_PAIRS = Mutations(run_seed), Mutations(run_pair)
mutation, of_a_pair = MUTATIONS.add, OF_PAIRS.add


@pytest.mark.parametrize("chunk", [0, *SLOW])
def test_c25_c26_requests_end_once_with_their_versions_tokens_whenever_the_engine_sleeps(chunk: int) -> None:
    seeds = range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)
    outcome = sum(map(run_seed, seeds), SleepOutcome(seeds=0))
    assert outcome.sleeps > 2 * PER_CHUNK
    assert outcome.updates > PER_CHUNK
    assert min(outcome.restarts, outcome.kept, outcome.offloaded) > 3


@pytest.mark.parametrize("seeds", [BUSY_PAIRS, *SLOW_PAIRS], ids=lambda seeds: str(seeds[0]))
def test_c22_c31_of_two_engines_either_may_sleep_and_take_other_weights(seeds: range) -> None:
    outcome = sum(map(run_pair, seeds), SleepingPairOutcome(seeds=0))
    assert outcome.sleeps > 2 * len(seeds)
    assert outcome.updates > len(seeds) // 4
    assert min(outcome.arrived, outcome.whole) >= outcome.pairs // 6


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [252, 1934, 2381, 2840, 3892, 5016, 6157, 7981, 8322, 8924, 9771])
def test_c22_c25_time_asleep_within_one_turn_is_not_delay(seed: int) -> None:
    """Seeds that failed while the oracles overlooked rests that begin and end within one turn."""
    assert run_pair(seed).sleeps


@mutation
def the_prefix_cache_is_kept_over_a_release(patch: Patch) -> None:
    patch.setattr(sleep, "forget_caches", lambda scheduler, now: None)
    patch.setattr(SleepingSimulation, "_check_clear", lambda self: None)


@mutation
def the_prefix_cache_is_kept_over_an_update(patch: Patch) -> None:
    """As if versions of the weights shared prefixes, and nothing were dropped."""
    clear, compute_with = EngineMemory.clear, Request.compute_with

    def kept(self: EngineMemory, void: Any, left: Any = None, *, committed: int = -1, released: bool = False) -> None:
        if released or left:
            clear(self, void, left, committed=committed, released=released)

    def shared(self: Request, weight_version: int) -> None:
        compute_with(self, weight_version)
        self.cache_namespace = f"0/{self.namespace}"

    patch.setattr(EngineMemory, "clear", kept)
    patch.setattr(Request, "compute_with", shared)
    patch.setattr(SleepingSimulation, "_check_clear", lambda self: None)


@mutation
def a_host_copy_of_an_old_version_is_loaded(patch: Patch) -> None:
    clear = EngineMemory.clear

    def mutated(
        self: EngineMemory, void: Any, left: Any = None, *, committed: int = -1, released: bool = False
    ) -> None:
        clear(self, void, left, committed=self.pools.steps.committed, released=released)

    patch.setattr(EngineMemory, "clear", mutated)


@mutation
def more_of_the_prefix_cache_is_kept_than_the_host_has_room_for(patch: Patch) -> None:
    patch.setattr(HostCopies, "bytes_of", lambda self, num_slots: 0)


@mutation
def the_device_is_not_told_where_kept_windows_are(patch: Patch) -> None:
    patch.setattr(Windows, "start_over", lambda self, draft: None)


@mutation
def generations_are_reset(patch: Patch) -> None:
    clear = Slots.clear

    def mutated(self: Slots) -> None:
        clear(self)
        self.generation = np.zeros_like(self.generation)

    patch.setattr(Slots, "clear", mutated)


@mutation
def memory_is_released_before_steps_in_flight_have_landed(patch: Patch) -> None:
    def done(self: Halt) -> bool:
        return not self._queues.num_running

    patch.setattr(Halt, "done", property(done))


@mutation
def who_goes_on_under_new_weights_keeps_its_tokens(patch: Patch) -> None:
    def mutated(scheduler: Scheduler, version: int) -> None:
        scheduler.queues.weight_version = version
        scheduler.memory.clear([])
        for req in scheduler.queues.waiting:
            req.compute_with(version)
            req.resume_after = 0

    patch.setattr(sleep, "weights_changed", mutated)


@mutation
def requests_start_while_the_engine_comes_to_a_halt(patch: Patch) -> None:
    begin = Halt.__init__

    def mutated(self: Halt, scheduler: Scheduler, mode: Mode) -> None:
        begin(self, scheduler, mode)
        scheduler.queues.admits = True

    patch.setattr(Halt, "__init__", mutated)


@mutation
def requests_that_waited_through_a_release_wait_for_a_step_that_never_comes(patch: Patch) -> None:
    def mutated(scheduler: Scheduler, now: float) -> None:
        pools = scheduler.pools
        scheduler.memory.clear([], committed=pools.steps.committed, released=True)
        for req in scheduler.queues.waiting:
            req.resume_after = pools.steps.launched + 1

    patch.setattr(sleep, "forget_caches", mutated)


@of_a_pair
def memory_is_released_while_a_peer_may_touch_it(patch: Patch) -> None:
    def done(self: Halt) -> bool:
        s = self._queues
        return not (s.num_running or s.flights or s.finishing or s.transferring or s.pools.draft.saves)

    patch.setattr(Halt, "done", property(done))
    patch.setattr(SleepingHalf, "_check_clear", lambda self: None)


@of_a_pair
def what_one_version_computes_is_decoded_by_another(patch: Patch) -> None:
    offered = Matches.offered

    def mutated(self: Matches, event: Offered, now: float) -> None:
        offered(self, replace(event, weight_version=self.queues.weight_version), now)

    patch.setattr(Matches, "offered", mutated)


@of_a_pair
def who_waits_with_an_open_ticket_waits_for_ever(patch: Patch) -> None:
    patch.setattr(Role, "drain", lambda self: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_of_sleeps_finds(name: str) -> None:
    seed = MUTATIONS.found_after(name, [FOUND_AT.get(name, 0), *range(PER_MUTATION)])
    assert seed is not None, f"no seed below {PER_MUTATION} fails although {name.replace('_', ' ')}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if FOUND_AT.get(name) == 6 else pytest.param(name, marks=pytest.mark.slow) for name in OF_PAIRS]
)
def test_the_simulator_of_a_pairs_sleeps_finds(name: str) -> None:
    seed = OF_PAIRS.found_after(name, [FOUND_AT.get(name, 0), *range(PER_MUTATION)])
    assert seed is not None, f"no seed below {PER_MUTATION} fails although {name.replace('_', ' ')}"

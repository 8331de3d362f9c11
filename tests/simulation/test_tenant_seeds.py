"""Random traffic of several tenants, and bugs put there on purpose: what must be found, soon."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.base.room import Room
from forebay.scheduler import admission, displacing, scheduler
from forebay.scheduler.admission import AdmissionPass
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.queues import Queues, by_rank
from tests.simulation.bugs import Mutations, Patch
from tests.simulation.event_log import Outcome
from tests.simulation.tenants import run_tenants

PER_CHUNK = 10
SLOW = [pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 100)]
PER_MUTATION = 200  # seeds, and each is found sooner

# Looked at first, where they are found late. An entry that is missing or no longer true costs time and nothing else.
FOUND_AT = {
    "newcomer_waits_for_whatever_runs": 332,
    "recomputed_tokens_are_charged_again": 6,
    "tenant_that_does_not_fit_is_never_passed_over": 72,
}

MUTATIONS = Mutations(run_tenants)
mutation = MUTATIONS.add


@pytest.mark.parametrize("chunk", [0, *SLOW])
def test_c32_tenants_random_traffic_keeps_shares_and_bounds(chunk: int) -> None:
    outcome = sum(map(run_tenants, range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK)), Outcome(seeds=0))
    assert outcome.seeds == PER_CHUNK
    if chunk == 0:  # the traffic is of the kind that finds bugs; any ten seeds need not be
        assert outcome.displaced >= 3
        assert outcome.retractions >= 20


@mutation
def newcomer_has_credit(patch: Patch) -> None:
    patch.setattr(Queues, "join", lambda self, account, line: None)


@mutation
def newcomer_begins_behind_all_others(patch: Patch) -> None:
    join = Queues.join

    def mutated(self: Any, account: Any, line: Any) -> Any:
        joins = account not in line.of
        join(self, account, line)
        if joins:
            account.service = 1 + max(other.service for other in self.accounts.values())

    patch.setattr(Queues, "join", mutated)


@mutation
def tenant_served_most_comes_next(patch: Patch) -> None:
    patch.setattr(admission, "_service", lambda account: -account.service)


@mutation
def oldest_request_comes_next(patch: Patch) -> None:
    patch.setattr(admission, "_service", lambda account: 0.0)


@mutation
def steps_cost_nothing_beside_their_tokens(patch: Patch) -> None:
    patch.setattr(scheduler, "charge_step", lambda *_: None)


@mutation
def recomputed_tokens_are_charged_again(patch: Patch) -> None:
    suspend = Preemption.suspend

    def mutated(self: Any, req: Any) -> Any:
        suspend(self, req)
        req.num_charged = 0

    patch.setattr(Preemption, "suspend", mutated)


@mutation
def retraction_forgets_tenants(patch: Patch) -> None:
    patch.setattr(Queues, "victim", property(lambda self: max([*self.running.reqs, *self.extending], key=by_rank)))


@mutation
def newcomer_waits_for_whatever_runs(patch: Patch) -> None:
    patch.setattr(Preemption, "displace", lambda self, blocked: None)


@mutation
def displacement_does_not_wait(patch: Patch) -> None:
    displace = Preemption.displace

    def mutated(self: Any, blocked: Any) -> Any:
        since = blocked.req.account.waits_since
        blocked.req.account.waits_since = -1000
        displace(self, blocked)
        blocked.req.account.waits_since = since

    patch.setattr(Preemption, "displace", mutated)


@mutation
def displacement_takes_what_is_within_a_share(patch: Patch) -> None:
    share = Room.share

    def mutated(self: Any, tenant: Any, limit: Any) -> Any:
        return share(self, tenant, limit) if limit > 64 else 1

    patch.setattr(Room, "share", mutated)


@mutation
def first_in_rank_is_displaced(patch: Patch) -> None:
    victim = displacing.Places.victim

    def mutated(self: Any, blocked: Any) -> Any:
        found = victim(self, blocked)
        return found and next(req for req in self._ranked if req.account is found.account)

    patch.setattr(displacing.Places, "victim", mutated)


@mutation
def full_queue_keeps_everybody_out(patch: Patch) -> None:
    patch.setattr(Room, "has_room", lambda self, tenant, limit, count=1: self.num_inside + count <= limit)


@mutation
def full_queue_keeps_nobody_out(patch: Patch) -> None:
    patch.setattr(Room, "has_room", lambda self, tenant, limit, count=1: True)


@mutation
def tenant_that_does_not_fit_is_never_passed_over(patch: Patch) -> None:
    does_not_fit = AdmissionPass._does_not_fit

    def mutated(self: Any, req: Any, **how: Any) -> Any:
        does_not_fit(self, req, **how)
        self._starts = False

    patch.setattr(AdmissionPass, "_does_not_fit", mutated)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_simulator_tenant_mutation_is_found(name: str) -> None:
    seed = MUTATIONS.found_after(name, [FOUND_AT.get(name, 0), *range(PER_MUTATION)])
    assert seed is not None, f"no seed below {PER_MUTATION} fails although {name.replace('_', ' ')}"

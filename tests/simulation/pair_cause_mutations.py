"""Bugs of the two roles that end requests without a cause, or keep them waiting: the pair simulator must find each.

`python -m tests.simulation.pair_cause_mutations` prints the first seed that finds each, and the score.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import numpy as np
from msgspec.structs import replace

from forebay.base.errors import EngineError
from forebay.memory import holding
from forebay.requests.transfers import Broken, Renewed
from forebay.requests.updates import Failure, FinishReason
from forebay.scheduler import offers
from forebay.scheduler.arrivals import Arrivals
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.handoff import ABORTED, LOST, Role
from forebay.scheduler.matches import Matches
from forebay.scheduler.offers import Offers
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.queues import Line, Queues
from forebay.scheduler.tickets import Tickets
from tests.simulation.bugs import Mutations, Patch
from tests.simulation.pair import run_pair

CAUSES = Mutations(run_pair)
mutation = CAUSES.add


@mutation
def decode_fails_a_whole_transfer_with_an_unknown_code(patch: Patch) -> None:
    _fail_every_third(patch, Failure.of(EngineError("no reason", code="nonsense")))


@mutation
def decode_fails_a_whole_transfer_with_a_code_of_its_own(patch: Patch) -> None:
    _fail_every_third(patch, LOST)


def _fail_every_third(patch: Patch, failure: Failure) -> None:
    arrive, number = DecodeRole._arrive, count(1)

    def mutated(self: Any, receiving: Any, tail: Any) -> Any:
        if receiving.req and next(number) % 3 == 0:
            self._fail(receiving, failure)
            return
        arrive(self, receiving, tail)

    patch.setattr(DecodeRole, "_arrive", mutated)


@mutation
def prefill_fails_a_request_whose_chunk_was_computed(patch: Patch) -> None:
    computed, number = PrefillRole.computed, count(1)

    def mutated(self: Any, req: Any) -> Any:
        computed(self, req)
        if next(number) % 4 == 0:
            self.outputs.finish(req, FinishReason.ERROR, LOST)

    patch.setattr(PrefillRole, "computed", mutated)


@mutation
def decode_ignores_a_broken_transfer(patch: Patch) -> None:
    _ignore(patch, DecodeRole, Broken)


@mutation
def prefill_ignores_a_broken_transfer(patch: Patch) -> None:
    _ignore(patch, PrefillRole, Broken)


@mutation
def decode_ignores_that_its_lease_is_renewed(patch: Patch) -> None:
    _ignore(patch, DecodeRole, Renewed)


def _ignore(patch: Patch, role: type[Role], what: type) -> None:
    take = role._take

    def mutated(self: Any, event: Any, *others: Any) -> Any:
        if not isinstance(event, what):
            take(self, event, *others)

    patch.setattr(role, "_take", mutated)


@mutation
def the_peer_is_told_another_failure(patch: Patch) -> None:
    withdraw = Tickets.withdraw
    patch.setattr(Tickets, "withdraw", lambda self, ticket, failure: withdraw(self, ticket, LOST))


@mutation
def the_peer_is_told_of_an_abort_that_did_not_happen(patch: Patch) -> None:
    ended = Role.ended
    patch.setattr(Role, "ended", lambda self, req, failure: ended(self, req, failure and ABORTED))


@mutation
def the_lease_of_prefill_never_ends(patch: Patch) -> None:
    overdue = PrefillRole.overdue
    patch.setattr(
        PrefillRole, "overdue", lambda self, req, now: None if req.maybe_allocation is None else overdue(self, req, now)
    )


@mutation
def the_lease_of_decode_never_ends(patch: Patch) -> None:
    patch.setattr(DecodeRole, "overdue", lambda self, req, now: None)


@mutation
def the_lease_of_decode_ends_too_early(patch: Patch) -> None:
    overdue = DecodeRole.overdue
    patch.setattr(DecodeRole, "overdue", lambda self, req, now: overdue(self, req, now + 0.5))


@mutation
def prefill_waits_for_offers_for_ever(patch: Patch) -> None:
    patch.setattr(PrefillRole, "overdue", lambda self, req, now: None)


@mutation
def a_decline_is_forgotten(patch: Patch) -> None:
    patch.setattr(Offers, "decline", lambda self, req, failure: None)


@mutation
def an_offer_waits_for_an_idle_engine(patch: Patch) -> None:
    has_room = Offers._has_room

    def mutated(self: Any, req: Any, *others: Any) -> Any:
        return not self.queues.num_running and has_room(self, req, *others)

    patch.setattr(Offers, "_has_room", mutated)


@mutation
def an_offer_that_does_not_fit_at_once_is_never_made(patch: Patch) -> None:
    has_room, refused = Offers._has_room, set()

    def mutated(self: Any, req: Any, *others: Any) -> Any:
        if req in refused or not has_room(self, req, *others):
            refused.add(req)
            return False
        return True

    patch.setattr(Offers, "_has_room", mutated)


@mutation
def offers_are_made_to_the_last_in_rank_first(patch: Patch) -> None:
    offer = Offers.run

    def mutated(self: Any, now: Any) -> Any:
        with Patch.context() as inside:
            inside.setattr(Line, "first", property(lambda line: list(line)[-1]))
            offer(self, now)

    patch.setattr(Offers, "run", mutated)


@mutation
def what_has_arrived_waits_for_an_idle_engine(patch: Patch) -> None:
    join = Arrivals.join
    patch.setattr(Arrivals, "join", lambda self: None if self.queues.num_running else join(self))


@mutation
def one_row_of_those_that_may_run_stays_empty(patch: Patch) -> None:
    join = Arrivals.join

    def mutated(self: Any) -> Any:
        if self.queues.num_running + 1 < self.queues.config.max_running_requests or not self.queues.running:
            join(self)

    patch.setattr(Arrivals, "join", mutated)


@mutation
def a_room_stays_in_use_behind_its_request(patch: Patch) -> None:
    ended = Role.ended

    def mutated(self: Any, req: Any, failure: Any) -> Any:
        rooms = dict(self._rooms)
        ended(self, req, failure)
        self._rooms = rooms

    patch.setattr(Role, "ended", mutated)


@mutation
def more_is_reserved_than_any_request_may_need(patch: Patch) -> None:
    ahead = holding.footprint_ahead

    def longer(kv: Any, most: Any, reserved: Any, page_size: Any, has: Any = 0) -> Any:
        return ahead(kv, np.asarray(most) + 4 * page_size, 1 << 20, page_size, has)

    patch.setattr(offers, "footprint_ahead", longer)


@mutation
def what_was_offered_is_free_once_damaged_ledgers_are_cleared(patch: Patch) -> None:
    patch.setattr(Tickets, "slots_in_transfer", lambda self: None)


@mutation
def transfers_go_on_to_requests_whose_places_were_cleared(patch: Patch) -> None:
    start_over = DecodeRole.start_over
    patch.setattr(DecodeRole, "start_over", lambda self, *, cleared: start_over(self, cleared=False))


@mutation
def a_recovery_forgets_the_other_requests(patch: Patch) -> None:
    requeue_all = Queues.requeue_all

    def mutated(self: Any, *, cleared: Any) -> Any:
        requeue_all(self, cleared=cleared)
        for req in list(self.waiting)[1:]:
            self.waiting.remove(req)

    patch.setattr(Queues, "requeue_all", mutated)


@mutation
def prefill_computes_for_an_offer_that_was_withdrawn(patch: Patch) -> None:
    match = Matches._match

    def mutated(self: Any, offered: Any, req: Any) -> Any:
        match(self, replace(offered, declined=None), req)

    patch.setattr(Matches, "_match", mutated)


if __name__ == "__main__":
    sys.exit(CAUSES.report(1500))

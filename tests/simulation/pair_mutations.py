"""Bugs on purpose in what two engines do for one request: what the simulation of a pair must find.

`python -m tests.simulation.pair_mutations` says after how many seeds each is found, and the score.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from forebay.memory.holding import DeferredFree
from forebay.memory.kinds.state.recurrent import States
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool
from forebay.memory.slots import NO_IDS, NO_SLOT
from forebay.requests.request import Status
from forebay.requests.step_plan import Admission
from forebay.requests.transfers import Send, Span
from forebay.scheduler import matches, offers
from forebay.scheduler.arrivals import Arrivals
from forebay.scheduler.decode_role import DecodeRole
from forebay.scheduler.handoff import Role
from forebay.scheduler.memory.allocator import Allocator
from forebay.scheduler.memory.deferred import Deferred
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.offers import Offers
from forebay.scheduler.prefill_role import PrefillRole
from forebay.scheduler.queues import Queues
from forebay.scheduler.tickets import Tickets
from tests.simulation.bugs import Mutations, Patch
from tests.simulation.pair import run_pair

MUTATIONS = Mutations(run_pair)
mutation = MUTATIONS.add


@mutation
def places_are_used_again_before_the_fence(patch: Patch) -> None:
    patch.setattr(DeferredFree, "is_free", property(lambda self: self.fence.is_open))


@mutation
def a_retraction_frees_a_tickets_pages(patch: Patch) -> None:
    release = Allocator.release

    def mutated(self: Any, req: Any, *args: Any) -> Any:
        if req.status is not Status.FINISHED and not (req.allocation.ticket and req.allocation.ticket.whole):
            req.allocation.ticket = None
        release(self, req, *args)

    patch.setattr(Allocator, "release", mutated)


@mutation
def pages_that_the_cache_had_already_are_freed_under_a_transfer(patch: Patch) -> None:
    free_pages = Deferred.free_pages

    def mutated(self: Any, held: Any, pages: Any) -> Any:
        ticket, held.ticket = held.ticket, None
        free_pages(self, held, pages)
        held.ticket = ticket

    patch.setattr(Deferred, "free_pages", mutated)


@mutation
def a_state_that_the_cache_was_given_may_be_evicted_while_it_is_read(patch: Patch) -> None:
    release_all = States.release_all

    def mutated(self: Any, held: Any) -> Any:
        holding = release_all(self, held)
        for node in holding.locked:
            self.unlock(node, NO_IDS)
        return holding._replace(locked=())

    patch.setattr(States, "release_all", mutated)


@mutation
def a_state_of_another_length_is_sent(patch: Patch) -> None:
    def mutated(self: Any, held: Any, pages: Any, start: Any = 0) -> Any:
        cached = self.in_tree.slot_of(held.pin.node) if held.pin.num_pages else NO_SLOT
        return np.array([cached or self.tracking(held).live], dtype=np.int64)

    patch.setattr(States, "transfer_slots", mutated)
    patch.setattr(Allocator, "offload", lambda self, held: False)


@mutation
def a_page_is_sent_before_its_chunk_has_committed(patch: Patch) -> None:
    def mutated(self: Any, req: Any) -> Any:
        sending, held, page_size = self._sending(req), req.allocation, self.queues.config.page_size
        stop = held.kv_bound // page_size * page_size
        if sending and stop > sending.next:
            held.ticket = sending
            places = self.queues.pools.kv_places(held, sending.next, stop)
            self.tickets.send(Send(ticket=sending.ticket, spans=places))
            sending.next = stop

    patch.setattr(PrefillRole, "computed", mutated)


@mutation
def the_partial_page_is_never_sent(patch: Patch) -> None:
    places = Pools.places

    def mutated(self: Any, held: Any, start: Any, kv_start: Any) -> Any:
        spans = places(self, held, start, kv_start)
        if held.ticket and held.kv_len % self.page_size and type(held.ticket).__name__ == "_Sending":
            spans["kv"] = Span(start=kv_start, ids=spans["kv"].ids[:-1])
        return spans

    patch.setattr(Pools, "places", mutated)


@mutation
def window_pages_are_said_to_be_of_another_place(patch: Patch) -> None:
    places = Pools.places

    def mutated(self: Any, held: Any, start: Any, kv_start: Any) -> Any:
        spans = places(self, held, start, kv_start)
        return spans | {kind: Span(start=start, ids=span.ids) for kind, span in spans.items() if kind == "window"}

    patch.setattr(Pools, "places", mutated)


@mutation
def a_tail_of_another_length_is_accepted(patch: Patch) -> None:
    def mutated(self: Any, receiving: Any, tail: Any) -> Any:
        receiving.settled, receiving.tail = True, tail

    patch.setattr(DecodeRole, "_arrive", mutated)


@mutation
def what_was_offered_is_let_go_of_without_its_ticket(patch: Patch) -> None:
    order = Offers._order

    def mutated(self: Any, req: Any, now: Any) -> Any:
        order(self, req, now)
        req.allocation.ticket = None

    patch.setattr(Offers, "_order", mutated)


@mutation
def a_prebuilt_row_is_a_token_too_short(patch: Patch) -> None:
    patch.setattr(Admission, "kv_len", property(lambda self: max(0, len(self.token_ids) - 2)))


@mutation
def one_more_runs_than_may(patch: Patch) -> None:
    join = Arrivals.join

    def mutated(self: Any) -> Any:
        config, rows = self.queues.config, self.queues.pools.rows
        more = config.max_running_requests + 1
        self.queues.config, rows.size = replace(config, max_running_requests=more), more
        join(self)
        self.queues.config, rows.size = config, more - 1

    patch.setattr(Arrivals, "join", mutated)
    patch.setattr(DecodeReqToTokenPool, "alloc_running", lambda self, reqs, num_running: self.alloc(reqs))


@mutation
def an_aborted_arrival_keeps_its_row(patch: Patch) -> None:
    free_parts = Deferred._free_parts

    def mutated(self: Any, held: Any, *parts: Any, row: Any = NO_SLOT, **others: Any) -> Any:
        free_parts(self, held, *parts, row=NO_SLOT if held.ticket else row, **others)

    patch.setattr(Deferred, "_free_parts", mutated)


@mutation
def a_room_in_use_is_taken_twice(patch: Patch) -> None:
    patch.setattr(Role, "admit", lambda self, req: None)


@mutation
def an_offer_is_taken_for_any_request_in_its_room(patch: Patch) -> None:
    patch.setattr(matches, "_is_of", lambda offered, req: offered.ticket.room == req.rendezvous.room)


@mutation
def drafts_of_the_rows_last_tenant_are_verified(patch: Patch) -> None:
    patch.setattr(DecodeRole, "most_drafts", lambda self, reqs, most: most)


@mutation
def nobody_is_told_of_an_abort(patch: Patch) -> None:
    patch.setattr(Tickets, "withdraw", lambda self, ticket, failure: None)


@mutation
def prefill_tells_the_end_before_all_has_arrived(patch: Patch) -> None:
    defer_end = PrefillRole.defer_end

    def mutated(self: Any, req: Any, reason: Any, update: Any) -> Any:
        deferred = defer_end(self, req, reason, update)
        if deferred and req.status is Status.TRANSFERRING:
            self._sent(self._sending(req), req)
        return deferred

    patch.setattr(PrefillRole, "defer_end", mutated)


@mutation
def places_are_offered_while_somebody_waits_for_memory(patch: Patch) -> None:
    """So much that those who run cannot get on: nobody may need more than there will be."""
    patch.setattr(Offers, "_has_room", lambda self, *others: self.queues.pools.available_pages > 0)


@mutation
def pages_are_counted_without_those_in_transit(patch: Patch) -> None:
    patch.setattr(offers, "footprint_ahead", lambda kv, *_: np.zeros_like(np.asarray(kv)))


@mutation
def a_failed_step_forgets_what_has_arrived(patch: Patch) -> None:
    start_over = DecodeRole.start_over

    def mutated(self: Any, *, cleared: Any) -> Any:
        start_over(self, cleared=cleared)
        self.arrivals.line.of.clear()

    patch.setattr(DecodeRole, "start_over", mutated)


@mutation
def an_unarrived_request_that_ends_waits_for_steps(patch: Patch) -> None:
    transfer = Queues.transfer

    def mutated(self: Any, req: Any) -> Any:
        transfer(self, req)
        if req.maybe_allocation and req.allocation.ticket:
            req.allocation.ticket.whole = False

    patch.setattr(Queues, "transfer", mutated)


if __name__ == "__main__":
    sys.exit(MUTATIONS.report(1500))

"""Bugs on purpose in what is particular to decodes of several tokens: lengths that only the device knows, drafts that
are not accepted, and ends within those that are. The last ones are the device's, to see that nobody overlooks them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.base.units import ceil_div
from forebay.memory.holding import RowTable
from forebay.memory.kinds.state.recurrent import Tracking
from forebay.memory.kinds.window.windows import Windows
from forebay.requests.request import Status
from forebay.requests.updates import FinishReason
from forebay.scheduler.memory import allocator
from forebay.scheduler.memory.allocator import Allocator, Prefixes
from forebay.scheduler.memory.pools import Pools
from forebay.scheduler.output_processor import OutputProcessor
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.scheduler import Scheduler
from tests.simulation.hash_runner import HashRunner
from tests.simulation.hashing import KEY
from tests.simulation.state_memory import StateMemory

Patch = pytest.MonkeyPatch


# -- lengths ----------------------------------------------------------------------------------------------------------


def a_rejected_tokens_page_is_adopted(patch: Patch) -> None:
    """With the last token known behind it, there is one more than has KV."""
    settle = RowTable.settle

    def mutated(self: Any, rows: Any, counts: Any, num_new: Any) -> Any:
        settle(self, rows, counts, num_new)
        run = rows[(self.request_id[rows] > 0) & (num_new <= counts)]
        self.kv_committed[run] += 1

    patch.setattr(RowTable, "settle", mutated)


def rejected_tokens_count_as_computed(patch: Patch) -> None:
    settle = RowTable.settle
    patch.setattr(RowTable, "settle", lambda self, rows, counts, num_new: settle(self, rows, counts, 1 + counts))


def the_bound_of_a_row_never_comes_back(patch: Patch) -> None:
    settle = RowTable.settle

    def mutated(self: Any, rows: Any, counts: Any, num_new: Any) -> Any:
        bound = self.kv_bound.copy()
        settle(self, rows, counts, num_new)
        self.kv_bound[:] = bound

    patch.setattr(RowTable, "settle", mutated)


def pages_are_reserved_for_a_token_less_than_the_width(patch: Patch) -> None:
    add_drafts = Allocator.add_drafts

    def mutated(self: Any, *args: Any) -> Any:
        with Patch.context() as inside:
            inside.setattr(allocator, "ceil_div", lambda kv_lens, page_size: ceil_div(kv_lens - 1, page_size))
            return add_drafts(self, *args)

    patch.setattr(Allocator, "add_drafts", mutated)


def an_outrun_length_is_read(patch: Patch) -> None:
    def mutated(self: Any, rows: Any) -> Any:
        return self.table.kv_lens(rows) >= self.table.num_pages[rows] * self.page_size

    patch.setattr(Pools, "opens_page", mutated)


def a_window_moves_on_by_the_bound(patch: Patch) -> None:
    trim = Windows.trim

    def mutated(self: Any, table: Any, rows: Any) -> Any:
        with Patch.context() as inside:
            inside.setattr(table, "kv_committed", table.kv_bound)
            trim(self, table, rows)

    patch.setattr(Windows, "trim", mutated)


def a_victims_length_is_taken_from_the_bound(patch: Patch) -> None:
    make_room = Preemption.make_room

    def mutated(self: Any) -> Any:
        table = self._queues.pools.table
        drafts = table.num_drafts.copy()
        table.num_drafts[:] = 0
        found = make_room(self)
        table.num_drafts[:] = drafts
        return found

    patch.setattr(Preemption, "make_room", mutated)


# -- snapshots --------------------------------------------------------------------------------------------------------


def a_length_is_wished_for_that_a_step_in_flight_may_pass(patch: Patch) -> None:
    reserve_snapshot = Tracking.reserve_snapshot
    patch.setattr(
        Tracking, "reserve_snapshot", lambda self, step, length, *, too_late: reserve_snapshot(self, step, length)
    )


def a_snapshot_is_that_of_the_bound(patch: Patch) -> None:
    """The host takes what a step tracked for the state behind all that was accepted."""
    complete = Tracking.complete

    def mutated(self: Any, step: Any, kv_committed: Any) -> Any:
        before = self.tracked
        complete(self, step, kv_committed)
        if self.tracked and self.tracked is not before:
            self.tracked = self.tracked._replace(length=kv_committed)

    patch.setattr(Tracking, "complete", mutated)


# -- ends -------------------------------------------------------------------------------------------------------------


def a_stop_token_within_the_accepted_is_ignored(patch: Patch) -> None:
    append = OutputProcessor.append

    def mutated(self: Any, req: Any, tokens: Any, *args: Any) -> Any:
        stops = req.stop_ids
        req.stop_ids = stops & {tokens[-1]} - {*tokens[:-1]}
        told = append(self, req, tokens, *args)
        req.stop_ids = stops
        return told

    patch.setattr(OutputProcessor, "append", mutated)


def a_token_behind_the_last_one_is_told(patch: Patch) -> None:
    """A draft more is verified than may come, and whoever takes in the tokens relies on that."""
    propose, append = Scheduler._propose, OutputProcessor.append

    def proposing(self: Any, reqs: Any, rows: Any, width: Any) -> Any:
        self.pools.table.max_kv_len[rows] += 1
        propose(self, reqs, rows, width)
        self.pools.table.max_kv_len[rows] -= 1

    def appending(self: Any, req: Any, *args: Any) -> Any:
        last = req.max_kv_len
        req.max_kv_len = last + 1
        told = append(self, req, *args)
        req.max_kv_len = last
        if req.status is not Status.FINISHED and len(req.tokens) > last:
            self.finish(req, FinishReason.LENGTH, update=self.updates[-1])
        return told

    patch.setattr(Scheduler, "_propose", proposing)
    patch.setattr(OutputProcessor, "append", appending)


def a_request_that_fails_behind_a_token_does_not_hear_it(patch: Patch) -> None:
    end_failed = OutputProcessor.end_failed
    patch.setattr(OutputProcessor, "end_failed", lambda self, failed, sampled, now: end_failed(self, failed, [], now))


def what_was_accepted_behind_the_end_is_adopted(patch: Patch) -> None:
    adopt = Prefixes.adopt

    def mutated(self: Any, req: Any, *args: Any, **how: Any) -> Any:
        with Patch.context() as inside:
            inside.setattr(allocator, "min", lambda num_committed, num_tokens: num_committed, raising=False)
            adopt(self, req, *args, **how)

    patch.setattr(Prefixes, "adopt", mutated)


def a_proposer_is_not_told_who_has_ended(patch: Patch) -> None:
    finish = OutputProcessor.finish

    def mutated(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Patch.context() as inside:
            inside.setattr(self, "proposer", None)
            finish(self, *args, **kwargs)

    patch.setattr(OutputProcessor, "finish", mutated)


# -- the device -------------------------------------------------------------------------------------------------------


def a_state_is_a_token_short(patch: Patch) -> None:
    advance = StateMemory.advance

    def mutated(self: Any, step: Any, accepted: Any) -> Any:
        short = step.span.decodes & (accepted > 1)
        advance(self, step, accepted - short)
        self.lens[step.plan.kinds.state.state_slots] += short  # which a real device does not know

    patch.setattr(StateMemory, "advance", mutated)


def a_state_is_that_of_the_last_draft(patch: Patch) -> None:
    advance = StateMemory.advance

    def mutated(self: Any, step: Any, accepted: Any) -> Any:
        advance(self, step, step.plan.q_lens)
        self.lens[step.plan.kinds.state.state_slots] = step.starts + accepted

    patch.setattr(StateMemory, "advance", mutated)


def a_snapshot_is_taken_of_the_last_accepted_token(patch: Patch) -> None:
    advance = StateMemory.advance

    def mutated(self: Any, step: Any, accepted: Any) -> Any:
        advance(self, step, accepted)
        work = step.plan.kinds.state
        inside = work.snap_lens - step.starts[work.snap_seqs]
        taken = (inside > 0) & (inside <= accepted[work.snap_seqs]) & step.span.decodes[work.snap_seqs]
        self.states[work.snap_slots[taken]] = self.states[work.state_slots[work.snap_seqs[taken]]]

    patch.setattr(StateMemory, "advance", mutated)


def penalties_count_a_rejected_draft(patch: Patch) -> None:
    sample = HashRunner._sample

    def mutated(self: Any, step: Any, tokens: Any, *args: Any) -> Any:
        result = sample(self, step, tokens, *args)
        accepted = np.array(result.num_new or step.plan.q_lens)
        rejected = step.inside >= accepted[step.which]
        np.add.at(self.counts, step.plan.rows[step.which[rejected]], KEY[tokens[rejected]])
        return result

    patch.setattr(HashRunner, "_sample", mutated)


def penalties_do_not_count_the_drafts_before(patch: Patch) -> None:
    patch.setattr(
        HashRunner, "_known", lambda self, step, tokens: (self.counts + self.seeds)[step.plan.rows][step.which]
    )


def what_a_draft_was_is_sampled_behind_a_rejected_one(patch: Patch) -> None:
    """All that agree count, wherever they stand."""

    def mutated(self: Any, step: Any, tokens: Any, chosen: Any) -> Any:
        accepted = step.plan.q_lens.copy()
        for i in range(step.plan.num_seqs if step.plan.width > 1 else 0):
            mine = slice(step.firsts[i], step.firsts[i] + step.plan.q_lens[i])
            accepted[i] = 1 + np.count_nonzero(tokens[mine][1:] == chosen[mine][:-1])
        return accepted

    patch.setattr(HashRunner, "_accept", mutated)


def a_row_begins_with_the_drafts_of_its_last_tenant(patch: Patch) -> None:
    draft = HashRunner._draft
    patch.setattr(HashRunner, "_draft", lambda self, step: None if step.plan.num_extends else draft(self, step))


WIDTH_MUTATIONS = {
    name: apply
    for name, apply in list(globals().items())
    if getattr(apply, "__module__", None) == __name__ and callable(apply)
}

"""Bugs on purpose: what the simulator must find, most of them copied from issues of real engines or from our own past.

`python -m tests.simulation.mutations` says after how many seeds each is found, and the score.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from forebay.memory import holding, slots
from forebay.memory.draft import Draft
from forebay.memory.holding import RowTable, StepFence
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.kv_allocator import PagedKvAllocator
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_index import RadixIndex
from forebay.requests.request import Request, Status
from forebay.requests.updates import FinishReason
from forebay.scheduler import admission, scheduler
from forebay.scheduler.memory.allocator import Allocator, Prefixes
from forebay.scheduler.memory.deferred import Deferred
from forebay.scheduler.memory.engine_memory import EngineMemory
from forebay.scheduler.output_processor import OutputProcessor
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.queues import Queues
from forebay.scheduler.scheduler import Scheduler
from tests.simulation.bugs import Mutations, Patch
from tests.simulation.fairness_mutations import FAIRNESS_MUTATIONS
from tests.simulation.hybrid_mutations import HYBRID_MUTATIONS
from tests.simulation.pooling_mutations import POOLING_MUTATIONS
from tests.simulation.simulator import run_seed
from tests.simulation.width_mutations import WIDTH_MUTATIONS

MUTATIONS = Mutations(run_seed)
mutation = MUTATIONS.add


# -- rows and pages ---------------------------------------------------------------------------------------------------


@mutation
def a_row_write_is_forgotten(patch: Patch) -> None:
    def mutated(self: Any, rows: Any, columns: Any, pages: Any) -> Any:
        self.rows.req_to_token[rows, columns] = pages

    patch.setattr(Draft, "write_each", mutated)


@mutation
def pages_are_released_under_a_step_in_flight(patch: Patch) -> None:
    patch.setattr(StepFence, "is_open", True)


@mutation
def a_row_is_released_under_a_step_in_flight(patch: Patch) -> None:
    free = Deferred.free

    def mutated(self: Any, freed: Any) -> Any:
        if freed.row != slots.NO_SLOT:
            self._rows.free_row(freed.row)
        free(self, replace(freed, row=slots.NO_SLOT))

    patch.setattr(Deferred, "free", mutated)


@mutation
def pages_are_released_twice(patch: Patch) -> None:
    give_back = Deferred._return

    def mutated(self: Any, freed: Any) -> Any:
        give_back(self, freed)
        if len(freed.pages) > 3:
            self._kv.return_ids(freed.pages[:1], freed.request_id)

    patch.setattr(Deferred, "_return", mutated)


@mutation
def a_page_leaks(patch: Patch) -> None:
    give_back = Deferred._return

    def mutated(self: Any, freed: Any) -> Any:
        kept = freed.pages[:-1] if len(freed.pages) > 3 else freed.pages
        give_back(self, replace(freed, pages=kept))

    patch.setattr(Deferred, "_return", mutated)


@mutation
def page_zero_is_handed_out(patch: Patch) -> None:
    init = PagedKvAllocator.__init__

    def mutated(self: Any, *args: Any, **kwargs: Any) -> Any:
        init(self, *args, **kwargs)
        self._stack[0] = slots.PAD
        self.owner[slots.PAD] = slots.FREE

    patch.setattr(PagedKvAllocator, "__init__", mutated)


@mutation
def admission_reserves_a_token_too_few(patch: Patch) -> None:
    right = holding.footprint
    patch.setattr(admission, "footprint", lambda kv_len, *held: right(kv_len - 1, *held))


@mutation
def one_table_entry_is_written_twice_in_a_step(patch: Patch) -> None:
    patch.setattr(Draft, "forget_row", lambda self, row: None)


# -- the prefix cache -------------------------------------------------------------------------------------------------


@mutation
def an_uncommitted_page_is_adopted(patch: Patch) -> None:
    launch = Queues.launch_extends

    def mutated(self: Any, chunks: Any) -> Any:
        launch(self, chunks)
        for chunk in chunks:
            self.memory.prefixes.adopt(chunk.req, chunk.stop)

    patch.setattr(Queues, "launch_extends", mutated)


@mutation
def the_last_tokens_page_is_adopted_before_it_has_kv(patch: Patch) -> None:
    commit = RowTable.commit
    patch.setattr(RowTable, "commit", lambda self, rows, kv_lens: commit(self, rows, kv_lens + 1))


@mutation
def what_a_failed_request_computed_is_adopted(patch: Patch) -> None:
    release = Allocator.release

    def mutated(self: Any, req: Any, num_committed: Any = None) -> Any:
        release(self, req, min(req.allocation.kv_bound, len(req.tokens)) if num_committed is None else num_committed)

    patch.setattr(Allocator, "release", mutated)


@mutation
def only_what_samples_is_looked_at(patch: Patch) -> None:
    commit = Scheduler.commit

    def mutated(self: Any, plan: Any, result: Any, now: Any) -> Any:
        failed = tuple(i for i in result.failed if plan.sample_mask[i])
        return commit(self, plan, replace(result, failed=failed), now)

    patch.setattr(Scheduler, "commit", mutated)


@mutation
def a_prefix_is_not_pinned(patch: Patch) -> None:
    patch.setattr(RadixCache, "_lock", lambda self, node: None)
    patch.setattr(RadixCache, "_unlock", lambda self, node: None)


@mutation
def a_pinned_leaf_is_evicted(patch: Patch) -> None:
    lock = RadixCache._lock

    def mutated(self: Any, node: Any) -> Any:
        rank = node.rank
        lock(self, node)
        if rank is not None:
            node.rank = rank
            self._leaves._of[node.tenant].add(rank)

    patch.setattr(RadixCache, "_lock", mutated)


@mutation
def the_whole_prompt_may_be_a_hit(patch: Patch) -> None:
    def mutated(self: Any, req: Any) -> Any:
        return self._cache.index.match(req.key(len(req.tokens)), req.namespace)

    patch.setattr(Prefixes, "match", mutated)


@mutation
def namespaces_are_ignored(patch: Patch) -> None:
    root = RadixCache._root
    patch.setattr(RadixCache, "_root", lambda self, namespace: root(self, ""))
    match = RadixIndex.match
    patch.setattr(RadixIndex, "match", lambda self, key, namespace="": match(self, key, ""))


@mutation
def a_match_is_a_page_too_long(patch: Patch) -> None:
    common = RadixIndex._common

    def mutated(self: Any, key: Any, edge: Any, position: Any, end: Any) -> Any:
        shared = common(self, key, edge, position, end)
        return min(shared + self.page_bytes, len(edge), end - position)

    patch.setattr(RadixIndex, "_common", mutated)


@mutation
def splitting_an_edge_mixes_up_its_pages(patch: Patch) -> None:
    split = RadixCache._split

    def mutated(self: Any, node: Any, at: Any) -> Any:
        upper = split(self, node, at)
        upper.pages = upper.pages[::-1].copy()
        return upper

    patch.setattr(RadixCache, "_split", mutated)


@mutation
def a_row_keeps_pages_that_the_cache_replaced(patch: Patch) -> None:
    adopt = Prefixes.adopt

    def mutated(self: Any, req: Any, num_committed: Any, **how: Any) -> Any:
        def write(self: Any, row: Any, start: Any, pages: Any) -> Any:
            self.rows.req_to_token[row, start : start + len(pages)] = pages

        with Patch.context() as inside:
            inside.setattr(Draft, "write_row", write)
            adopt(self, req, num_committed, **how)

    patch.setattr(Prefixes, "adopt", mutated)


@mutation
def evicted_pages_stay_booked_as_evictable(patch: Patch) -> None:
    evict = RadixCache.evict

    def mutated(self: Any, num_pages: Any) -> Any:
        count = evict(self, num_pages)
        self.num_evictable += count > 2
        return count

    patch.setattr(RadixCache, "evict", mutated)


# -- requests ---------------------------------------------------------------------------------------------------------


@mutation
def an_abort_is_lost_while_a_prompt_is_under_way(patch: Patch) -> None:
    abort = Scheduler.abort

    def mutated(self: Any, request_id: Any) -> Any:
        req = self.requests.get(request_id)
        if not (req and req.status is Status.EXTENDING):
            abort(self, request_id)

    patch.setattr(Scheduler, "abort", mutated)


@mutation
def an_abort_goes_by_the_ids_beginning(patch: Patch) -> None:
    def mutated(self: Any, request_id: Any) -> Any:
        for id, req in list(self.requests.items()):
            if str(id).startswith(str(request_id)):
                self.outputs.finish(req, FinishReason.ABORT)

    patch.setattr(Scheduler, "abort", mutated)


@mutation
def timeouts_are_not_noticed(patch: Patch) -> None:
    patch.setattr(scheduler, "overdue", lambda req, config, now, admits: None)


@mutation
def a_finish_forgets_the_waiting_tokens(patch: Patch) -> None:
    finish = OutputProcessor.finish

    def mutated(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = self.queues.num_waiting_tokens
        finish(self, req, *args, **kwargs)
        self.queues.num_waiting_tokens = waiting

    patch.setattr(OutputProcessor, "finish", mutated)


@mutation
def stop_tokens_are_noticed_only_after_the_first(patch: Patch) -> None:
    append = OutputProcessor.append

    def mutated(self: Any, req: Any, *args: Any) -> Any:
        stops = req.stop_ids
        req.stop_ids = () if req.num_output == 0 else stops
        told = append(self, req, *args)
        req.stop_ids = stops
        return told

    patch.setattr(OutputProcessor, "append", mutated)


@mutation
def a_request_gets_a_token_too_many(patch: Patch) -> None:
    init = Request.__init__

    def mutated(self: Any, *args: Any, **kwargs: Any) -> Any:
        init(self, *args, **kwargs)
        self.max_kv_len += 1

    patch.setattr(Request, "__init__", mutated)


# -- retraction -------------------------------------------------------------------------------------------------------


@mutation
def a_retracted_request_loses_its_last_token(patch: Patch) -> None:
    retract = Preemption.retract

    def mutated(self: Any, req: Any) -> Any:
        retract(self, req)
        if req.num_output:
            req.tokens.pop()
            self._queues.num_waiting_tokens -= 1

    patch.setattr(Preemption, "retract", mutated)


@mutation
def a_retracted_request_resumes_while_a_step_still_computes_for_it(patch: Patch) -> None:
    retract = Preemption.retract

    def mutated(self: Any, req: Any) -> Any:
        retract(self, req)
        req.resume_after = 0

    patch.setattr(Preemption, "retract", mutated)


@mutation
def the_token_in_flight_at_a_retraction_is_dropped(patch: Patch) -> None:
    append = OutputProcessor.append

    def mutated(self: Any, req: Any, *args: Any) -> Any:
        return append(self, req, *args) if req.status is not Status.WAITING else 0

    patch.setattr(OutputProcessor, "append", mutated)


@mutation
def a_retracted_request_survives_the_failure_of_its_step(patch: Patch) -> None:
    fail = Scheduler.fail

    def mutated(self: Any, plan: Any, error: Any) -> Any:
        flight = self.queues.flights[0]
        flight.reqs[:] = [req for req in flight.reqs if req.status is not Status.WAITING]
        fail(self, plan, error)

    patch.setattr(Scheduler, "fail", mutated)


@mutation
def prompt_logprobs_are_sent_twice_after_a_retraction(patch: Patch) -> None:
    start = Queues.start

    def mutated(self: Any, req: Any, *args: Any) -> Any:
        collected = req.prompt_logprobs
        start(self, req, *args)
        req.prompt_logprobs = collected

    patch.setattr(Queues, "start", mutated)


@mutation
def a_retracted_request_waits_for_a_step_that_may_never_come(patch: Patch) -> None:
    retract = Preemption.retract

    def mutated(self: Any, req: Any) -> Any:
        retract(self, req)
        req.resume_after += 1

    patch.setattr(Preemption, "retract", mutated)


@mutation
def a_request_retracted_often_never_starts_again(patch: Patch) -> None:
    admit = admission.AdmissionPass._admit
    patch.setattr(
        admission.AdmissionPass,
        "_admit",
        lambda self, req, *args: admit(self, req, *args) if req.num_retractions < 3 else None,
    )


# -- failing launches --------------------------------------------------------------------------------------------------


@mutation
def a_failed_step_loses_a_page(patch: Patch) -> None:
    start_over = EngineMemory.start_over

    def mutated(self: Any, reqs: Any, *args: Any) -> Any:
        start_over(self, reqs, *args)
        if self.pools.kv.num_free:
            self.pools.kv.take_ids(1, 1)

    patch.setattr(EngineMemory, "start_over", mutated)


@mutation
def window_writes_of_a_failed_launch_are_swallowed(patch: Patch) -> None:
    patch.setattr(Windows, "start_over", lambda self, draft: None)


MUTATIONS |= HYBRID_MUTATIONS | FAIRNESS_MUTATIONS | WIDTH_MUTATIONS | POOLING_MUTATIONS


if __name__ == "__main__":
    sys.exit(MUTATIONS.report(1000))

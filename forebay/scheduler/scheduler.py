"""The scheduler: a state machine without clock, sockets, tensors or processes.

`plan` decides a step from what is known, `commit` takes its result. With overlap, several plans are in flight at once,
and they commit in the order in which they were made. Time is an argument. The same calls give the same decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Final

import numpy as np

from forebay.base.errors import ForebayError, InvalidRequest
from forebay.config.engine_config import SchedulePolicy, SchedulerConfig
from forebay.memory.slots import Ids
from forebay.requests.pictures import Picture
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import MOST_CHUNK_ENDS, Failure, FinishReason, MemoryReport, Update
from forebay.scheduler.admission import AdmissionPass, NewTokenRatio
from forebay.scheduler.audit import audit
from forebay.scheduler.encoding import attach_pictures, release_pictures
from forebay.scheduler.grammars import Constraints, Grammars
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.journal import (
    Aborted,
    Added,
    Committed,
    Drafted,
    Expired,
    Flushed,
    FlushedOn,
    Planning,
    Reclaimed,
    Recovering,
    StepFailed,
    Unwritable,
)
from forebay.scheduler.limits import check_fits, check_room, overdue
from forebay.scheduler.output_processor import OutputProcessor, by_request, charge_step
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.proposer import Proposer, draft_tokens
from forebay.scheduler.queues import Flight, Queues
from forebay.scheduler.recovery import Recovery, quarantine_leaks, requeue_unsuspected, stuck_requests
from forebay.scheduler.state import SchedulerState

NO_LIMIT: Final = 1 << 30  # tokens of prompts in a step


class Scheduler:
    """Continuous batching over one engine's memory.

    `queues` has the unfinished requests, `outputs` the updates of their clients, `preemption` and `recovery` return
    requests to the waiting queue. `proposer` drafts tokens on the host, None if the device does or nothing does.
    `handoff` is the role of an engine that computes one half of its requests. `grammars` restrict tokens, None if no
    request may have a grammar.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        proposer: Proposer | None = None,
        handoff: Handoff | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.config, self.proposer, self.handoff = config, proposer, handoff or Handoff()
        self.queues = Queues(config, Constraints(grammars))
        self.memory, self.pools = self.queues.memory, self.queues.pools
        self.requests, self.counters = self.queues.requests, self.queues.counters
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.outputs = OutputProcessor(self.queues, proposer, self.handoff)
        self.preemption = Preemption(self.queues, self.handoff, self.ratio)
        self.recovery = Recovery(self.queues, self.outputs, self.handoff)
        self.handoff.bind(self.queues, self.outputs)
        self.chunk_limit = NO_LIMIT  # most tokens of prompts in a step, below the configured number
        self._num_submitted = 0

    @property
    def constraints(self) -> Constraints:
        """Return the grammars of the queued and running requests."""
        return self.queues.constraints

    # -- arrival and end ------------------------------------------------------------------------------------------

    def add(self, req: Request, now: float, pictures: Sequence[Picture] = ()) -> None:
        """Queue a request, or raise InvalidRequest, RequestTooLarge or Overloaded with the numbers and keep nothing of
        it."""
        if self.queues.journal is not None:
            self.queues.journal(Added.of(req, now, pictures))
        self.queues.now = now
        if req.id in self.requests:
            raise InvalidRequest(f"request id {req.id} is in use")
        self.handoff.admit(req)
        check_fits(req, self.config, self.pools.usable_pages)
        self._check_room(req)
        with ExitStack() as undo:
            if pictures:
                attach_pictures(self.queues, self.memory.tiers, req, pictures)
                undo.callback(release_pictures, self.pools, req)
            if req.params.grammar:
                self.queues.constraints.begin(req)
                undo.callback(self.queues.constraints.ended, req)
            self._num_submitted += 1
            priority = -req.priority if self.config.schedule_policy is SchedulePolicy.PRIORITY else 0
            req.rank = (priority, self._num_submitted)
            req.account = self.queues.accounts[req.tenant]
            req.arrival = req.last_progress = now
            req.compute_with(self.queues.weight_version)
            self.counters["requests"] += 1
            self.counters["prompt_tokens"] += req.num_prompt
            self.requests[req.id] = req
            undo.callback(self.requests.pop, req.id)
            self.queues.room.enter(req.tenant)
            undo.callback(self.queues.room.leave, req.tenant)
            self.pools.adapters.enter(req.adapter)
            undo.callback(self.pools.adapters.leave, req.adapter)
            self.handoff.enqueue(req, now)
            undo.pop_all()

    def _check_room(self, req: Request) -> None:
        if req.tenant not in self.queues.accounts:
            raise InvalidRequest(f"the tenant {req.tenant!r} is not known: give it a weight in `tenants`")
        num_tokens = self.queues.num_waiting_tokens + sum(len(other.tokens) for other in self.queues.pending)
        account = self.queues.accounts[req.tenant]
        own = chain.from_iterable(line.of.get(account, ()) for line in (self.queues.waiting, self.queues.pending))
        check_room(req, self.config, self.queues.room, num_tokens, own)

    def abort(self, request_id: int) -> None:
        """End a request, in whatever state it is. An unknown or ended request is ignored."""
        if self.queues.journal is not None:
            self.queues.journal(Aborted(request_id))
        if req := self.requests.get(request_id):
            self.outputs.finish(req, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """End the requests that exceed a time limit of the queue, of a request, or between two tokens."""
        if self.queues.journal is not None:
            self.queues.journal(Expired(now))
        self.handoff.expire(now)
        for req in list(self.requests.values()):
            if error := overdue(req, self.config, now, self.queues.admits) or self.handoff.overdue(req, now):
                self.outputs.finish(req, FinishReason.ERROR, Failure.of(error))

    def notice_unwritable(self) -> None:
        """Store nothing more in tiers of the prefix cache that can no longer be written."""
        for tier in self.memory.tiers.all:
            if tier.stores and not tier.writable():
                if self.queues.journal is not None:
                    self.queues.journal(Unwritable(tier.name))
                tier.stores = False

    # -- deciding -------------------------------------------------------------------------------------------------

    def plan(self, now: float, width: int = 1, mixed_limit: int = NO_LIMIT) -> StepPlan | None:
        """Decide the next step, or return None if nothing can be done before a commit.

        Decodes compute up to `width` tokens each, all but the first of them drafts, unless the step has prompts.
        Prompts have at most `mixed_limit` tokens beside decodes.
        """
        if self.queues.journal is not None:
            self.queues.journal(Planning(now, width, mixed_limit, self.chunk_limit))
        self.queues.now = now
        if width > 1 and self.proposer and self.queues.flights:
            return None  # a proposer on the host must know the last token
        self._before_plan(now)
        active, roomy = self.preemption.make_room()
        decoding, rows = self.memory.allocator.decode(self.queues.running, active)
        if decoding or not self.queues.running.reqs:
            self.ratio.after_decode()
        started = self._cut_prompts(now, roomy, mixed_limit)
        draft = self.pools.draft
        if not (draft.chunks or decoding or draft.encodes or draft.copies_tiers):
            self.outputs.finish_each(stuck_requests(self.queues, may_admit=roomy))
            return None
        if width > 1:
            self._propose(decoding, rows, width)
        return self._launch(decoding, rows, started)

    def _launch(self, decoding: list[Request], rows: Ids, started: list[Request]) -> StepPlan:
        """Freeze the draft of the step into its plan, with these decodes."""
        draft = self.pools.draft
        if self.queues.constraints.living:
            draft.masked = self.queues.constraints.fill(draft, decoding)
        plan = self.memory.launch(rows, started)
        self.queues.flights.append(
            Flight(
                plan,
                [*(chunk.req for chunk in draft.chunks), *decoding],
                draft.chunks,
                draft.encoded_for,
                ahead=bool(self.queues.flights),
            )
        )
        if draft.chunks:
            self.queues.launch_extends(draft.chunks)
        if self.queues.journal is not None:
            self.queues.journal(plan)
        return plan

    def _before_plan(self, now: float) -> None:
        """Take in what happened since the last plan: transfers, retentions that end, grammars, a failed step, a blocked
        tenant."""
        if self.queues.pending.of or self.queues.transferring:
            self.handoff.before_plan(now)
        for retention in self.memory.tiers.retentions:
            if retention.nodes:
                retention.expire(now)
        if self.queues.constraints.unready:
            self.outputs.finish_each(self.queues.constraints.refused(self.queues.journal))
        if self.queues.suspects.groups:
            requeue_unsuspected(self.queues)
        elif self.queues.blocked:
            self.preemption.displace(self.queues.blocked)

    def _propose(self, reqs: Sequence[Request], rows: Ids, width: int) -> None:
        """Draft tokens for these requests, which the step decodes, within the length limit of each. Beside prompts none
        are drafted.

        While suspects are under test, no step has drafts, so that a failure is attributed to the right request."""
        if self.pools.draft.chunks or self.queues.suspects.groups:
            return
        table = self.pools.table
        most = self.handoff.most_drafts(reqs, np.minimum(table.max_kv_len[rows] - table.kv_bound[rows], width - 1))
        counts, tokens = draft_tokens(self.proposer, reqs, most, self.queues.constraints, self.pools.pictures)
        if self.proposer and self.queues.journal is not None:
            self.queues.journal(Drafted(counts[most > 0].tolist()))
        if counts.any():
            self.counters["draft_tokens"] += self.memory.allocator.add_drafts(rows, counts, tokens)

    def _cut_prompts(self, now: float, may_admit: bool, mixed_limit: int) -> list[Request]:
        """Draft the chunks of the step: of prompts under way, and of the requests that are admitted, which are
        returned."""
        queues = self.queues
        queues.blocked = None
        starts = may_admit and queues.admits and bool(queues.waiting.of)
        if not (queues.extending or starts):
            return []
        num_tokens = min(self.config.chunked_prefill_size, self.chunk_limit)
        if queues.running.reqs:
            num_tokens = min(num_tokens, self.config.mixed_chunk_size, mixed_limit)
        if queues.extending:
            self.memory.allocator.trim(queues.extending)
        admission = AdmissionPass(queues, self.ratio.value, starts=starts)
        if starts and self.memory.tiers.all:
            num_tokens = admission.load(num_tokens)
        admitted = admission.run(num_tokens)
        queues.claimant = None
        for chunk, report in admitted:
            queues.start(chunk.req, report, now)
        return [chunk.req for chunk, _ in admitted]

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Process the result of the oldest launched step.

        Each of its requests gets one update, and a second one if it fails after a token."""
        if self.queues.journal is not None:
            self.queues.journal(Committed.of(plan, result, now, self.queues.step_cost))
        flight = self.queues.flights.popleft()
        assert flight.plan is plan, f"step {plan.step} was committed before step {flight.plan.step}"
        sampled = by_request(flight, result)
        # First, so that nothing below keeps values that are not finite (C30).
        failed = list(map(flight.reqs.__getitem__, result.failed))
        if failed:
            self.outputs.end_failed(failed, sampled, now)
        stops = [chunk.stop for chunk in flight.chunks]
        loaded = self.memory.commit(plan, stops, result.num_new, result.counts, result.lost)
        if flight.chunks or flight.encoded_for:
            self._commit_chunks(flight, result, now)
        if self.queues.finishing:
            self._release_finished(flight, failed)
        if result.num_new:
            self.outputs.count_partly_accepted(flight, result.num_new)
        self.counters["replayed_steps"] += result.replayed
        self.outputs.take_tokens(
            sampled, now, replayed=result.replayed, padded=result.padded, ahead=flight.ahead, loaded=loaded
        )
        if self.queues.step_cost:
            charge_step(self.queues.step_cost, sampled, flight, result)
        if result.vectors:
            self.outputs.take_vectors(flight, result.vectors)
        self.counters["steps"] += 1
        if not self.requests:
            self.ratio.when_idle()
        if self.queues.suspects.groups:
            self.queues.suspects.clear_passed()

    def fail(self, plan: StepPlan, error: ForebayError) -> None:
        """Handle that the oldest launched step did not complete; see `Recovery.fail`."""
        if self.queues.journal is not None:
            self.queues.journal(StepFailed(plan.step, error.code))
        self.recovery.fail(plan, error)

    def recover(self, error: ForebayError, culprit: Request | None) -> bool:
        """Handle an error that no step raised; see `Recovery.recover`."""
        if self.queues.journal is not None:
            self.queues.journal(Recovering(culprit.id if culprit else -1, error.code))
        return self.recovery.recover(error, culprit)

    def _release_finished(self, flight: Flight, failed: Collection[Request]) -> None:
        """Release the ended requests of which `flight` was the last step. Nothing is kept of `failed` requests."""
        for req in [req for req in self.queues.finishing if req in flight.reqs]:
            if req in failed or not any(req in later.reqs for later in self.queues.flights):
                self.queues.finishing.remove(req)
                self.memory.allocator.release(req, None if req in failed else req.allocation.kv_len)

    def _commit_chunks(self, flight: Flight, result: StepResult, now: float) -> None:
        for req in flight.encoded_for:
            req.last_progress = now
        for i, (req, start, stop) in enumerate(flight.chunks):
            if req.status is Status.FINISHED:
                continue
            if result.prompt_logprobs and i in result.prompt_logprobs:
                req.prompt_logprobs += result.prompt_logprobs[i]
            if req.status is Status.WAITING:
                continue  # retracted since: it no longer has the pages, but its first token may be among the results
            req.last_progress = now
            self.counters["computed_prompt_tokens"] += stop - start
            req.num_chunks += 1
            if req.num_chunks <= MOST_CHUNK_ENDS:
                req.chunk_ends_s.append(now - req.arrival)
            self.memory.prefixes.adopt(req, stop)
            if req.retentions and stop >= req.num_prompt:
                req.kept = MemoryReport(0, 0, [], *self.memory.prefixes.retain(req, now))
            if req.rendezvous:
                self.handoff.computed(req)

    # -- maintenance ---------------------------------------------------------------------------------------------

    def take_updates(self) -> list[Update]:
        """Return the updates recorded since the last call, including those of calls that raised."""
        return self.outputs.take_updates()

    @property
    def idle(self) -> bool:
        return self.queues.idle and not self.pools.draft.stores

    def flush_cache(self) -> int:
        """Begin to drop every prefix that no request holds, and return the number of their pages. `continue_flush`,
        to be called between steps, does the rest."""
        if self.queues.journal is not None:
            self.queues.journal(Flushed())
        self.memory.tiers.clear()
        if self.pools.ghosts is not None:
            self.pools.ghosts.clear()
        count = self.pools.cache.begin_flush()
        self.pools.cache.continue_flush()
        return count

    @property
    def flushing(self) -> bool:
        """Whether pages to flush are still cached."""
        return self.pools.cache.flushing

    def continue_flush(self) -> bool:
        """Drop one slice, which takes less than 1 ms; return whether more is left."""
        if self.queues.journal is not None and self.flushing:
            self.queues.journal(FlushedOn())
        return self.pools.cache.continue_flush()

    def audit(self) -> None:
        """Raise unless everything has exactly one holder (C8). Costs O(pool): for tests and idle moments."""
        arriving = [req for req in self.queues.transferring if req.maybe_allocation]
        self.memory.tiers.audit()
        audit(self.pools, [*self.queues.running.reqs, *self.queues.extending, *self.queues.finishing, *arriving])
        reqs = self.requests.values()
        self.pools.adapters.audit(Counter(req.adapter.number for req in reqs if req.adapter))
        if self.pools.pictures is not None:
            seen = (req.pictures.encodings for req in reqs if req.pictures is not None)
            self.pools.pictures.audit(Counter(encoding.number for encoding in chain.from_iterable(seen)))

    def reclaim_leaks(self) -> int:
        """When idle: quarantine pages that no living request holds, so that a leak is counted and never reused."""
        assert self.queues.idle, "only an idle engine can tell a leak from a page in use"
        if self.queues.journal is not None:
            self.queues.journal(Reclaimed())
        return quarantine_leaks(self.queues)

    def state(self, now: float) -> SchedulerState:
        """Return a snapshot of queues, pools, counters and tenants, for metrics and /state."""
        return SchedulerState.of(self.queues, now)

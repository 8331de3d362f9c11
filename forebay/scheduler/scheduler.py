"""The scheduler: a state machine without clock, sockets, tensors or processes.

`plan` decides a step from what is known, `commit` learns what came of it; several plans may be out at once (overlap),
and commits come in the order of the plans. Time is an argument. The same calls give the same decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Final

import numpy as np

from forebay.base.errors import ForebayError, InvalidRequest, NumericalError
from forebay.config.engine_config import SchedulePolicy, SchedulerConfig
from forebay.memory.slots import Ids
from forebay.requests.pictures import Picture
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import Failure, FinishReason
from forebay.scheduler.admission import AdmissionPass, NewTokenRatio
from forebay.scheduler.audit import audit
from forebay.scheduler.displacing import Places
from forebay.scheduler.encoding import forget_pictures, release_pictures, take_in
from forebay.scheduler.grammars import Grammars
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.limits import check_fits, check_room, nothing_may_follow, overdue
from forebay.scheduler.output_processor import OutputProcessor, Sampled, by_request, charge_step
from forebay.scheduler.proposer import Proposer, draft_tokens
from forebay.scheduler.queues import Blocked, Flight
from forebay.scheduler.recovery import quarantine_leaks, set_back_unsuspected, start_over, stuck_requests
from forebay.scheduler.state import SchedulerState

NO_LIMIT: Final = 1 << 30  # tokens of prompts in a step


class Scheduler(OutputProcessor):
    """Continuous batching over one engine's memory. `proposer` guesses tokens, where that is done on the host;
    `handoff` is the engine's role, where others compute the other half of its requests; `grammars` say which tokens may
    come, where requests ask for that."""

    def __init__(
        self,
        config: SchedulerConfig,
        proposer: Proposer | None = None,
        handoff: Handoff | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(config, proposer, handoff or Handoff(), grammars)
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self._num_submitted = 0

    # -- coming and going -----------------------------------------------------------------------------------------

    def add(self, req: Request, now: float, pictures: Sequence[Picture] = ()) -> None:
        """Queue a request, or raise InvalidRequest, RequestTooLarge or Overloaded with the numbers and keep nothing."""
        self.now = now
        if req.id in self.requests:
            raise InvalidRequest(f"request id {req.id} is in use")
        self.handoff.admit(req)
        check_fits(req, self.config, self.pools.usable_pages)
        self._check_room(req)
        with ExitStack() as undo:
            if pictures:
                take_in(self, req, pictures)
                undo.callback(release_pictures, self.pools, req)
            if req.params.grammar:
                self.constraints.begin(req)
                undo.callback(self.constraints.ended, req)
            self._num_submitted += 1
            priority = -req.priority if self.config.schedule_policy is SchedulePolicy.PRIORITY else 0
            req.rank = (priority, self._num_submitted)
            req.account = self.accounts[req.tenant]
            req.arrival = req.last_progress = now
            req.compute_with(self.weight_version)
            self.counters["requests"] += 1
            self.counters["prompt_tokens"] += req.num_prompt
            self.requests[req.id] = req
            undo.callback(self.requests.pop, req.id)
            self.room.enter(req.tenant)
            undo.callback(self.room.leave, req.tenant)
            self.pools.adapters.enter(req.adapter)
            undo.callback(self.pools.adapters.leave, req.adapter)
            self.handoff.enqueue(req, now)
            undo.pop_all()

    def _check_room(self, req: Request) -> None:
        if req.tenant not in self.accounts:
            raise InvalidRequest(f"the tenant {req.tenant!r} is not known: give it a weight in `tenants`")
        num_tokens = self.num_waiting_tokens + sum(len(other.tokens) for other in self.pending)
        account = self.accounts[req.tenant]
        own = chain.from_iterable(line.of.get(account, ()) for line in (self.waiting, self.pending))
        check_room(req, self.config, self.room, num_tokens, own)

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; nothing if it ended already or never was."""
        if req := self.requests.get(request_id):
            self.finish(req, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """End the requests that queued, ran or stood still for too long."""
        self.handoff.expire(now)
        for req in list(self.requests.values()):
            if error := overdue(req, self.config, now, self.admits) or self.handoff.overdue(req, now):
                self.finish(req, FinishReason.ERROR, Failure.of(error))

    # -- deciding -------------------------------------------------------------------------------------------------

    def plan(self, now: float, width: int = 1, mixed_limit: int = NO_LIMIT) -> StepPlan | None:
        """Decide the next step, or None when there is nothing that could be done before a commit. Decodes compute up to
        `width` tokens each, the last ones of them guessed, unless there are prompts in the step. Prompts have at most
        `mixed_limit` tokens beside decodes."""
        self.now = now
        if width > 1 and self.proposer and self.flights:
            return None  # who guesses here must know the last token
        if self.pending.of or self.transferring:
            self.handoff.before_plan(now)
        for req, error in self.constraints.refused() if self.constraints.unready else ():
            self.finish(req, FinishReason.ERROR, Failure.of(error))
        if self.suspects.groups:
            set_back_unsuspected(self)
            width = 1  # nobody is found guilty of what was only guessed
        elif self.blocked:
            self._make_way(self.blocked)
        active, roomy = self._decoding_rows()
        may_admit = roomy and self.admits
        if active is None or len(active):
            if self.running.reqs:
                self.memory.allocator.decode(self.running, active)
            self.ratio.after_decode()
        started = self._cut_prompts(now, may_admit, mixed_limit)
        chunks = self.pools.draft.chunks
        decoding, rows = self.running.reqs, self.running.req_pool_indices_cpu
        if active is not None:
            decoding, rows = [decoding[i] for i in active.tolist()], rows[active]
        if not (chunks or decoding or self.pools.draft.encodes):
            for req, why in stuck_requests(self) if may_admit else ():
                self.finish(req, FinishReason.ERROR, Failure.of(why))
            return None
        if width > 1 and not chunks:
            self._propose(decoding, rows, width)
        if self.constraints.living:
            self.pools.draft.masked = self.constraints.fill(self.pools.draft, decoding)
        encoded_for = self.pools.draft.encoded_for
        plan = self.memory.launch(rows, started)
        self.flights.append(Flight(plan, [*(chunk.req for chunk in chunks), *decoding], chunks, encoded_for))
        if chunks:
            self.launch_extends(chunks)
        return plan

    def _decoding_rows(self) -> tuple[Ids | None, bool]:
        """Return the indices of the requests that decode in this step, None for all; and whether they have room.

        More requests may be admitted only if they have room. If not, unused pages of draft tokens are freed, and then
        the last request in rank is retracted, until the others have room.

        Requests are left out if a step in flight brings them to their length limit, or if their grammar must first read
        a token in flight. If needed pages are yet to be freed, the youngest requests that need one are left out, too.
        """
        batch, roomy = self.running, True
        while batch.reqs:
            active, rows = None, batch.req_pool_indices_cpu
            out = batch.tokens_left <= 0 if self.flights else None
            if self.constraints.unready or (self.constraints.living and self.flights):
                waits = self.constraints.blocked_rows(batch.reqs, (flight.reqs for flight in self.flights))
                out = waits if out is None else out | waits
            if out is not None and out.any():
                active = np.flatnonzero(~out)
                rows = rows[active]
            opens = self.pools.opens_page(rows)
            short = int(np.count_nonzero(opens)) - self.pools.available_pages
            if short <= 0:
                return active, roomy
            if self.memory.allocator.free_unused(batch.req_pool_indices_cpu):
                continue
            finishing = sum(req.allocation.num_pages for req in self.finishing)
            alone = self.num_running == 1 and not self.handoff.has_arrivals
            if short <= self.pools.deferred.num_pages + finishing or alone:
                break
            roomy = False
            if self.victim.allocation.num_drafts:  # nobody knows how much to take from it before its steps commit
                break
            self.retract(self.victim)
        else:
            return None, roomy
        everyone = np.arange(len(batch)) if active is None else active
        youngest = sorted(everyone[opens].tolist(), key=lambda i: batch.reqs[i].rank)[-short:]
        if not roomy:
            youngest += [i for i in everyone.tolist() if batch.reqs[i].allocation.num_drafts]
        return np.setdiff1d(everyone, youngest), roomy

    def _propose(self, reqs: Sequence[Request], rows: Ids, width: int) -> None:
        """Find draft tokens for these requests, which the step decodes: no more than each may still come to."""
        table = self.pools.table
        most = self.handoff.most_drafts(reqs, np.minimum(table.max_kv_len[rows] - table.kv_bound[rows], width - 1))
        counts, tokens = draft_tokens(self.proposer, reqs, most, self.constraints, self.pools.pictures)
        if counts.any():
            self.counters["draft_tokens"] += self.memory.allocator.add_drafts(rows, counts, tokens)

    def _make_way(self, blocked: Blocked) -> None:
        """Where a tenant has waited long enough for places that are within its share, take them from one that is above
        its own. Nobody else starts before; and nothing is taken while memory is on its way back."""
        req = blocked.req
        if req.status is not Status.WAITING or req.account.is_patient(self.pools.steps.launched, self.now):
            return
        victim = Places(self, self.ratio.value).victim(blocked)
        if victim is None:
            return
        self.way_for = req.account
        if not (blocked.returning or victim.allocation.num_drafts):
            self.counters["displaced"] += 1
            self.suspend(victim)

    def retract(self, req: Request) -> None:
        """Take a request's memory, because others need it, and let it wait."""
        req.num_retractions += 1
        self.suspend(req)
        self.counters["retractions"] += 1
        stay = self.running.reqs
        self.ratio.after_retraction(sum(r.num_output for r in stay), sum(r.params.max_tokens for r in stay), len(stay))

    def suspend(self, req: Request) -> None:
        """Let a request that runs wait. What it computed is copied to the host where that is the cheaper way to have it
        again; what else of it the cache has stays there as long as there is room."""
        self.remove(req)
        if not (req.wants_prompt_logprobs or req.pools_all) and self.memory.allocator.offload(req.allocation):
            self.counters["retractions_kept"] += 1
        self.set_back(req)

    def _cut_prompts(self, now: float, may_admit: bool, mixed_limit: int) -> list[Request]:
        """Draft the step's chunks: of prompts under way and of those of requests that can start, which are returned."""
        self.blocked, starts = None, may_admit and bool(self.waiting.of)
        if not (self.extending or starts):
            return []
        left = self.config.chunked_prefill_size
        if self.running.reqs:
            left = min(left, self.config.mixed_chunk_size, mixed_limit)
        if self.extending:
            self.memory.allocator.trim(self.extending)
        admitted = AdmissionPass(self, self.ratio.value, starts=starts).run(left)
        self.way_for = None
        for chunk, report in admitted:
            self.start(chunk.req, report, now)
        return [chunk.req for chunk, _ in admitted]

    # -- learning -------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what the oldest launched step sampled; of each of its requests there is one update, and one more
        of those that fail behind a token."""
        flight = self.flights.popleft()
        assert flight.plan is plan, f"step {plan.step} was committed before step {flight.plan.step}"
        sampled = by_request(flight, result)
        # First of all, so that nothing below takes what is not finite for something that may be kept (C30).
        failed = [flight.reqs[i] for i in result.failed]
        if failed:
            self._end_failed(failed, sampled, now)
        self.memory.commit(plan, [chunk.stop for chunk in flight.chunks], result.num_new)
        self._commit_chunks(flight, result, now)
        if self.finishing:
            self._release_finished(flight, failed)
        if result.num_new:
            self._count_partly_accepted(flight, result.num_new)
        self._take_tokens(sampled, now)
        if self.step_cost:
            charge_step(self.step_cost, sampled, flight, result)
        if result.vectors:
            self._take_vectors(flight, result.vectors)
        if result.counts:
            self.pools.count(result.counts)
        self.counters["steps"] += 1
        if not self.requests:
            self.ratio.when_idle()
        if self.suspects.groups:
            self.suspects.clear_passed()

    def fail(self, plan: StepPlan, error: ForebayError) -> None:
        """The oldest launched step did not complete, and none launched behind it counts (their results, if there are
        any, have been waited for and thrown away).

        A request that was alone in it ends with `error`. Of several nobody knows which: all go back to what completed
        steps left and are run again in halves, so that only who fails alone ends, and the others get the same tokens.
        """
        flight = self.flights[0]
        assert flight.plan is plan, f"step {plan.step} failed before step {flight.plan.step} landed"
        self.counters["failed_steps"] += 1
        suspected = flight.suspected
        start_over(self)
        living = [(req, length) for req, length in suspected if req.status is not Status.FINISHED]
        if len(suspected) > 1:
            self.suspects.add_group(living)
            return
        for req, _ in living:
            self.finish(req, FinishReason.ERROR, Failure.of(error))

    def recover(self, error: ForebayError, culprit: Request | None) -> bool:
        """Something raised `error`, perhaps half-way through a call of this scheduler, and in work for `culprit` alone
        if that is known. The results of the steps in flight have been waited for and thrown away.

        The culprit ends, and everybody else starts over. Where no culprit is known, those that ran go on trial. Returns
        whether several do: smaller groups will tell more.
        """
        self.counters["recoveries"] += 1
        ran = [req for req in self.requests.values() if req.status in (Status.EXTENDING, Status.DECODING)]
        if culprit is None and len(ran) == 1 and ran[0] in self.suspects.under_test:
            culprit = ran[0]
        suspected = [(req, req.held.kv_committed + 1 if req.held else len(req.tokens)) for req in ran]
        start_over(self)
        if culprit is None:
            self.suspects.add_group(suspected)
        elif self.requests.get(culprit.id) is culprit:
            told = next((update for update in reversed(self.updates) if update.request_id == culprit.id), None)
            self.finish(culprit, FinishReason.ERROR, Failure.of(error), told)
        return culprit is None and len(suspected) > 1

    def _release_finished(self, flight: Flight, failed: Collection[Request]) -> None:
        """`flight` has landed, the last one of some that had ended; what it computed for `failed` is worth nothing."""
        for req in [req for req in self.finishing if req in flight.reqs]:
            if req in failed or not any(req in later.reqs for later in self.flights):
                self.finishing.remove(req)
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
            self.memory.prefixes.adopt(req, stop)
            if req.rendezvous:
                self.handoff.computed(req)

    def _end_failed(self, failed: list[Request], sampled: list[Sampled], now: float) -> None:
        """End these requests, for which something was not finite: with the tokens chosen before, if one of them is
        their last, as without draft tokens. As if aborted with the step in flight, so that nothing of it is kept."""
        forget_pictures(self.pools, failed)
        before = [(req, own[:-1], logs) for req, own, logs in sampled if len(own) > 1 and req in failed]
        self._take_tokens(before, now)
        for req in failed:
            if req.status is not Status.FINISHED:
                self.finish(req, FinishReason.ERROR, Failure.of(self._why_it_failed(req)))

    def _why_it_failed(self, req: Request) -> ForebayError:
        return self.constraints.error(req) or nothing_may_follow(req) or _not_finite(req)

    # -- looking after itself -------------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Begin to drop every prefix that no request holds, and return how many pages those are. `go_on_flushing`, to
        be called between steps, does the rest."""
        count = self.pools.cache.begin_flush()
        self.go_on_flushing()
        return count

    @property
    def flushing(self) -> bool:
        """Whether some of what is to be dropped is still cached."""
        return self.pools.cache.flushing

    def go_on_flushing(self) -> bool:
        """Drop one slice, which takes less than 1 ms; return whether there is more."""
        return self.pools.cache.go_on_flushing()

    def audit(self) -> None:
        """Raise unless everything has exactly one holder (C8). Costs O(pool): for tests and idle moments."""
        arriving = [req for req in self.transferring if req.held]
        audit(self.pools, [*self.running.reqs, *self.extending, *self.finishing, *arriving])
        reqs = self.requests.values()
        self.pools.adapters.audit(Counter(req.adapter.number for req in reqs if req.adapter))
        if self.pools.pictures is not None:
            seen = (req.pictures.encodings for req in reqs if req.pictures is not None)
            self.pools.pictures.audit(Counter(its.number for its in chain.from_iterable(seen)))

    def reclaim_leaks(self) -> int:
        """When idle: quarantine pages that no living request holds, so that a leak is counted and never reused."""
        assert self.idle, "only an idle engine can tell a leak from a page in use"
        return quarantine_leaks(self)

    def state(self, now: float) -> SchedulerState:
        """Return a snapshot of queues, pools, counters and tenants, for metrics and /state."""
        return SchedulerState.of(self, now)


def _not_finite(req: Request) -> NumericalError:
    return NumericalError(
        f"what the model computed after at most {len(req.tokens)} tokens of this request was not finite (NaN or "
        "infinite); other requests are not affected: check the checkpoint, or try --dtype float32"
    )

"""The scheduler: a state machine without clock, sockets, tensors or processes.

`plan` decides a step from what is known, `commit` learns what came of it; several plans may be out at once (overlap),
and commits come in the order of the plans. Time is an argument. The same calls give the same decisions.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.base.errors import EngineError, ForebayError, InvalidRequest, NumericalError, RequestTimeout
from forebay.base.log import event, get_logger
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.slots import Ids, as_ids
from forebay.requests.request import Request, Status
from forebay.requests.schedule_batch import ScheduleBatch
from forebay.requests.step_plan import StepPlan, StepResult, TokenLogprob
from forebay.requests.updates import CacheReport, Failure, FinishReason, Update
from forebay.scheduler.admission import AdmissionPass, NewTokenRatio
from forebay.scheduler.audit import audit, reclaim_leaks
from forebay.scheduler.door import check_fits, check_room, overdue
from forebay.scheduler.plan_builder import Chunk, build_plan
from forebay.scheduler.policy import rank, victim
from forebay.scheduler.residency import Residencies
from forebay.scheduler.state import Counters, SchedulerState, page_map, pool_usage
from forebay.scheduler.suspects import Suspects, blamed_on

log = get_logger("scheduler")

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step: whose results are awaited, in the plan's order."""

    plan: StepPlan
    reqs: list[Request]


class Scheduler:
    """Continuous batching over one engine's memory.

    Requests that decode stand in `running`, a batch of columns; those whose known tokens still lack KV in `extending`;
    the others wait, in the order of their rank.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.held = Residencies(config)
        self.running = ScheduleBatch(self.held.table)
        self.extending: list[Request] = []
        self.waiting: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.counters = Counters()
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.suspects = Suspects()
        self._news: list[Update] = []  # of the call under way, which may not come to its end, or of the last one
        self._finishing: list[Request] = []  # ended, but a step in flight makes a state of theirs worth keeping
        self._flights: deque[_Flight] = deque()
        self._num_submitted = 0
        self._num_waiting_tokens = 0
        self._step = 0

    # -- coming and going -----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.requests or self._flights)

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.extending)

    def add(self, req: Request, now: float) -> None:
        """Queue a request, or raise InvalidRequest, RequestTooLarge or Overloaded with the numbers and keep nothing."""
        if req.id in self.requests:
            raise InvalidRequest(f"request id {req.id} is in use")
        check_fits(req, self.config, self.held.usable_pages)
        check_room(req, self.config, len(self.requests), self._num_waiting_tokens)
        self._num_submitted += 1
        req.order = self._num_submitted
        req.arrival = req.last_progress = now
        self.counters.add("requests")
        self.counters.add("prompt_tokens", req.num_prompt)
        self.requests[req.id] = req
        try:
            self._enqueue(req)
        except Exception:
            del self.requests[req.id]
            raise

    def abort(self, request_id: int, now: float) -> list[Update]:
        """End a request wherever it is; nothing if it ended already or never was."""
        self._news = []
        req = self.requests.get(request_id)
        return [self._finish(req, FinishReason.ABORT)] if req else []

    def expire(self, now: float) -> list[Update]:
        """End the requests that queued, ran or stood still for too long."""
        self._news = []
        late = [(req, why) for req in list(self.requests.values()) if (why := overdue(req, self.config, now))]
        return [self._finish(req, FinishReason.ERROR, _failure(RequestTimeout(why))) for req, why in late]

    def _enqueue(self, req: Request) -> None:
        insort(self.waiting, req, key=self._rank)
        self._num_waiting_tokens += len(req.tokens)

    def _rank(self, req: Request) -> tuple[int, int]:
        return rank(req, self.config.schedule_policy)

    # -- deciding -------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step, or None when there is nothing that could be done before a commit."""
        self._news = []
        if self.suspects:
            self._set_back_who_is_not_on_trial()
        may_admit = self._make_room_to_decode()
        active = self._decodable()
        if active is None or len(active):
            self.held.decode(self.running, active)
            self.ratio.after_decode()
        chunks, admitted = self._plan_extends(now, may_admit)
        decoding, rows = self.running.reqs, self.running.req_pool_indices_cpu
        if active is not None:
            decoding, rows = [decoding[i] for i in active.tolist()], rows[active]
        if not chunks and not decoding:
            if may_admit:
                self._end_who_is_stuck()
            return None
        self._step += 1
        plan = build_plan(self._step, chunks, rows, admitted, self.held)
        self._flights.append(_Flight(plan, [*(chunk.req for chunk in chunks), *decoding]))
        self.held.launched(self._step)
        if chunks:
            self._launch_extends(chunks)
        return plan

    def take_news(self) -> list[Update]:
        """What the last call had to tell, once: what it returned, and of `plan` who ended because it is stuck."""
        news, self._news = self._news, []
        return news

    def _decodable(self) -> Ids | None:
        """Indices of the running requests that decode in this step; None for all of them.

        Left out are those that a step in flight brings to their end, and, when pages are short because they are still
        leaving, the youngest of those that would need one.
        """
        active, opens = self._who_goes_on()
        excess = int(np.count_nonzero(opens)) - self.held.available_pages
        if excess > 0:
            everyone = np.arange(len(self.running)) if active is None else active
            reqs = self.running.reqs
            youngest = sorted(everyone[opens].tolist(), key=lambda i: self._rank(reqs[i]))[-excess:]
            active = np.setdiff1d(everyone, youngest)
        return active

    def _who_goes_on(self) -> tuple[Ids | None, Bools]:
        """Indices of the running requests that no step in flight brings to their end, None for all; and of each of
        them, whether its next token opens a page."""
        batch, active = self.running, None
        rows = batch.req_pool_indices_cpu
        if self._flights and (ended := batch.seq_lens_cpu >= batch.max_kv_lens_cpu).any():
            active = np.flatnonzero(~ended)
            rows = rows[active]
        return active, self.held.opens_page(rows)

    def _make_room_to_decode(self) -> bool:
        """Retract requests until the others can decode; True when none had to go, so that more may be admitted."""
        roomy = True
        finishing = sum(req.residency.num_pages for req in self._finishing)
        while self._pages_short() > self.held.leaving_pages + finishing and self.num_running > 1:
            self._retract(victim([*self.running.reqs, *self.extending], self.config.schedule_policy))
            roomy = False
        return roomy

    def _pages_short(self) -> int:
        if not len(self.running):
            return 0
        _, opens = self._who_goes_on()
        return int(np.count_nonzero(opens)) - self.held.available_pages

    def _retract(self, req: Request) -> None:
        """Take a request's memory and let it wait. What it computed is copied to the host where that is the cheaper
        way to have it again; what else of it the cache has stays there as long as there is room."""
        self._remove(req)
        if not req.wants_prompt_logprobs and self.held.keep(req.residency):
            self.counters.add("retractions_kept")
        req.num_retractions += 1
        self._set_back(req)
        self.counters.add("retractions")
        stay = self.running.reqs
        self.ratio.after_retraction(
            sum(r.num_output for r in stay), sum(r.params.max_new_tokens for r in stay), len(stay)
        )

    def _set_back(self, req: Request) -> None:
        """Let a request that has left its batch wait; what completed steps computed for it stays in the cache."""
        self.held.release(req, req.residency.kv_committed)
        req.move(Status.WAITING)
        req.resume_after = self.held.steps.launched
        self._enqueue(req)

    def _plan_extends(self, now: float, may_admit: bool) -> tuple[list[Chunk], list[Request]]:
        """Cut this step's chunks: first of the prompts under way, then of whoever can be admitted."""
        budget = self.config.chunked_prefill_size
        if len(self.running):
            budget = min(budget, self.config.mixed_chunk_size)
        chunks: list[Chunk] = []
        self.held.slide(self.extending)
        for req in self.extending:
            with blamed_on(req):
                budget = self._cut(req, budget, chunks)
        admitted: list[Request] = []
        if self.waiting and may_admit and budget > 0:
            admission = AdmissionPass(self.config, self.held, self.running, self.extending, self.ratio.value)
            with closing(admission.run(self._candidates(), budget)) as started:
                for req, report in started:
                    with blamed_on(req):
                        self._start(req, report, now)
                        admitted.append(req)
                        budget = self._cut(req, budget, chunks)
        return chunks, admitted

    def _candidates(self) -> list[Request]:
        if not self.suspects:
            return self.waiting
        return [req for req in self.waiting if req in self.suspects.on_trial]

    def _cut(self, req: Request, budget: int, chunks: list[Chunk]) -> int:
        held = req.residency
        start = held.kv_len
        stop = min(held.extend_target, start + budget)
        if stop == start:
            return budget
        stop = self.held.limit(held, stop)
        self.held.extend(held, stop)
        chunks.append(Chunk(req, start, stop))
        return budget - (stop - start)

    def _start(self, req: Request, report: CacheReport, now: float) -> None:
        self.waiting.remove(req)
        self._num_waiting_tokens -= len(req.tokens)
        req.move(Status.EXTENDING)
        req.last_progress = now
        req.prompt_logprobs = []  # a retraction before the first token: every position is computed again
        insort(self.extending, req, key=self._rank)
        if req.cache_report is None:
            req.cache_report = report
            self.counters.add("cached_tokens", report.cached_tokens)
            self.counters.add(f"misses.{report.miss_reason}")
        else:
            self.counters.add("recomputed_tokens", len(req.tokens) - report.cached_tokens)

    def _launch_extends(self, chunks: Sequence[Chunk]) -> None:
        """The chunks are on their way: requests whose last chunk this is decode from the next step on."""
        extends = ScheduleBatch(self.held.table)
        extends.prepare_for_extend([chunk.req for chunk in chunks], [chunk.stop for chunk in chunks])
        complete = [i for i, (req, _, stop) in enumerate(chunks) if stop == req.residency.extend_target]
        extends.filter_batch(as_ids(complete))
        for req in extends.reqs:
            req.move(Status.DECODING)
            self.extending.remove(req)
        self.running.merge_batch(extends)

    # -- learning -------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Update]:
        """Take in what the oldest launched step sampled; the news of its requests, one update each at most."""
        self._news = []
        flight = self._land(plan)
        # First of all, so that nothing below takes what is not finite for something that may be kept (C30).
        failed = [flight.reqs[i] for i in result.failed]
        living = [req for req in failed if req.status is not Status.FINISHED]
        updates = [self._finish(req, FinishReason.ERROR, _failure(_not_finite(req))) for req in living]
        self.held.committed(plan)
        self._commit_chunks(flight, result, now)
        self._release_finished(flight, failed)
        logprobs = result.logprobs
        num_generated = 0
        for i, (req, token) in enumerate(zip(self._sampled(flight), result.token_ids, strict=True)):
            if req.status is Status.FINISHED:
                continue  # it ended while this step was in flight
            num_generated += 1
            updates.append(self._append(req, token, logprobs[i] if logprobs else None, now))
        self.counters.add("generated_tokens", num_generated)
        self.counters.add("steps")
        if not self.requests:
            self.ratio.when_idle()
        if self.suspects:
            self.suspects.acquit_who_passed()
        return updates

    def fail(self, plan: StepPlan, error: ForebayError, now: float) -> list[Update]:
        """The oldest launched step did not complete, and none launched behind it counts (their results, if there are
        any, have been waited for and thrown away).

        A request that was alone in it ends with `error`. Of several nobody knows which: all go back to what completed
        steps left and are run again in halves, so that only who fails alone ends, and the others get the same tokens.
        """
        self._news = []
        flight = self._flights[0]
        assert flight.plan is plan, f"step {plan.step} failed before step {flight.plan.step} landed"
        self.counters.add("failed_steps")
        accused = list(zip(flight.reqs, plan.seq_lens.tolist(), strict=True))
        self._start_over()
        accused = [(req, length) for req, length in accused if req.status is not Status.FINISHED]
        if len(flight.reqs) > 1:
            self.suspects.accuse(accused)
            return []
        return [self._finish(req, FinishReason.ERROR, _failure(error)) for req, _ in accused]

    def recover(self, error: ForebayError, culprit: Request | None) -> bool:
        """Something raised `error`, a call of this scheduler perhaps, half-way, in work for `culprit` alone if that is
        known. The results of the steps in flight have been waited for and thrown away. The culprit ends, and everybody
        else starts over; where nobody is known to be to blame those that ran go on trial. `take_news` has what the call
        had to tell as well. Returns whether several go on trial: smaller groups will tell more."""
        self.counters.add("recoveries")
        ran = [req for req in self.requests.values() if req.status is not Status.WAITING]
        if culprit is None and len(ran) == 1 and ran[0] in self.suspects.on_trial:
            culprit = ran[0]
        accused = [(req, req.held.kv_committed + 1 if req.held else len(req.tokens)) for req in ran]
        self._start_over()
        if culprit is None:
            self.suspects.accuse(accused)
        elif self.requests.get(culprit.id) is culprit:
            told = next((update for update in self._news if update.request_id == culprit.id), None)
            self._finish(culprit, FinishReason.ERROR, _failure(error), told)
        return culprit is None and len(accused) > 1

    def _start_over(self) -> None:
        """Nobody runs, nothing is in flight: every living request waits, with the tokens that it has. What completed
        steps computed for it stays in the cache, unless the books turn out to be wrong: then everything is free."""
        plans = [flight.plan for flight in self._flights]
        self._flights.clear()
        try:
            self.held.start_over([req for req in self.requests.values() if req.held], self._finishing, plans)
            audit(self.held, [])
        except Exception as error:
            log.error(event("books_cleared", effect="the prefix cache is empty"), exc_info=error)
            self.counters.add("books_cleared")
            self.held.clear(plans)
        self.running = ScheduleBatch(self.held.table)
        self.extending, self._finishing = [], []
        for req in self.requests.values():
            if req.status is not Status.WAITING:
                req.move(Status.WAITING)
            req.held = None
            req.resume_after = 0
        self.waiting = sorted(self.requests.values(), key=self._rank)
        self._num_waiting_tokens = sum(len(req.tokens) for req in self.waiting)

    def _set_back_who_is_not_on_trial(self) -> None:
        for req in [*self.running.reqs, *self.extending]:
            if req not in self.suspects.on_trial:
                self._remove(req)
                self._set_back(req)

    def _end_who_is_stuck(self) -> None:
        """Nothing could be planned. Where nothing is on its way back either, some memory is lost: who needs more than
        there is left ends now rather than with its time-out, and does not hold up the others."""
        if self._flights or self._finishing or self.held.leaving:
            return
        if self.num_running:
            stuck: list[tuple[Request, ForebayError]] = [(self.running.reqs[0], self._memory_lost())]
        elif self.waiting:
            self._quarantine_leaks()
            stuck = self._who_no_longer_fits() or [(self._candidates()[0], self._memory_lost())]
        else:
            return
        for req, why in stuck:
            self._finish(req, FinishReason.ERROR, _failure(why))

    def _who_no_longer_fits(self) -> list[tuple[Request, ForebayError]]:
        found: list[tuple[Request, ForebayError]] = []
        for req in self.waiting:
            try:
                check_fits(req, self.config, self.held.usable_pages)
            except ForebayError as error:
                found.append((req, error))
        return found

    def _memory_lost(self) -> EngineError:
        lost = ", ".join(f"{slots.num_quarantined} of {slots.capacity} {slots.name}" for slots, _ in self.held.pools)
        return EngineError(
            f"the engine has lost memory (set aside: {lost}), and what is left is too little for this request: restart",
            code="memory_lost",
        )

    def _land(self, plan: StepPlan) -> _Flight:
        flight = self._flights.popleft()
        assert flight.plan is plan, f"step {plan.step} was committed before step {flight.plan.step}"
        return flight

    def _release_finished(self, flight: _Flight, failed: Collection[Request]) -> None:
        """`flight` has landed, the last one of some that had ended; what it computed for `failed` is worth nothing."""
        for req in [req for req in self._finishing if req in flight.reqs]:
            if req in failed or not any(req in later.reqs for later in self._flights):
                self._finishing.remove(req)
                self.held.release(req, None if req in failed else req.residency.kv_len)

    def _sampled(self, flight: _Flight) -> list[Request]:
        plan = flight.plan
        if not plan.num_extends:
            return flight.reqs
        return [req for req, samples in zip(flight.reqs, plan.sample_mask.tolist(), strict=True) if samples]

    def _commit_chunks(self, flight: _Flight, result: StepResult, now: float) -> None:
        plan = flight.plan
        for i in range(plan.num_extends):
            req = flight.reqs[i]
            if req.status is Status.FINISHED:
                continue
            if result.prompt_logprobs and i in result.prompt_logprobs:
                req.prompt_logprobs += result.prompt_logprobs[i]
            if req.status is Status.WAITING:
                continue  # retracted since: it no longer has the pages, but its first token may be among the results
            req.last_progress = now
            self.counters.add("computed_prompt_tokens", int(plan.q_lens[i]))
            self.held.adopt(req, int(plan.seq_lens[i]))

    def _append(self, req: Request, token: int, logprob: TokenLogprob | None, now: float) -> Update:
        """One token more, known and told: both or, where memory is short, neither, so that it is never told twice.
        What needs memory comes first."""
        update = Update(req.id, [token], logprobs=None if logprob is None else [logprob])
        if not req.num_output:
            update.cache = req.cache_report
            if req.params.prompt_logprobs >= 0:
                update.prompt_logprobs = [None, *req.prompt_logprobs[: req.num_prompt - 1]]
        self._news.append(update)
        try:
            req.tokens.append(token)
        except Exception:
            self._news.pop()
            raise
        req.last_progress = now
        if req.prompt_logprobs:
            req.prompt_logprobs = []
        if req.status is Status.WAITING:
            self._num_waiting_tokens += 1
        if token in req.stop_ids:
            update.matched_stop = token
            self._finish(req, FinishReason.STOP, update=update)
        elif len(req.tokens) > req.max_kv_len:
            self._finish(req, FinishReason.LENGTH, update=update)
        return update

    def _finish(
        self, req: Request, reason: FinishReason, failure: Failure | None = None, update: Update | None = None
    ) -> Update:
        """The one way out: everything is released, and the last update says why. It is told first: what goes wrong in
        releasing must not swallow it."""
        if update is None:
            update = Update(req.id, [], cache=req.cache_report)
            self._news.append(update)
        update.finish, update.failure = reason, failure
        was = req.status
        req.move(Status.FINISHED)
        del self.requests[req.id]
        self.counters.add(f"finished.{reason}")
        if self.suspects:
            self.suspects.acquit(req)
        if was is Status.WAITING:
            self.waiting.remove(req)
            self._num_waiting_tokens -= len(req.tokens)
            self.held.kept.drop(req.id)
            return update
        self._remove(req, was)
        if reason is not FinishReason.ERROR and self.held.is_finishing(req):
            self.held.table.move_out(req.residency.row)
            self._finishing.append(req)
        else:
            self.held.release(req, None if reason is FinishReason.ERROR else req.residency.kv_committed)
        return update

    def _remove(self, req: Request, status: Status | None = None) -> None:
        """Take an admitted request, which has or had this status, out of its batch."""
        if (status or req.status) is Status.EXTENDING:
            self.extending.remove(req)
        else:
            self.running.filter_batch(np.flatnonzero(self.running.req_pool_indices_cpu != req.residency.row))

    # -- looking after itself -------------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Drop every prefix that no request holds; how many pages."""
        return self.held.cache.flush()

    def audit(self) -> None:
        """Raise unless everything has exactly one holder (C8). Costs O(pool): for tests and idle moments."""
        audit(self.held, [*self.running.reqs, *self.extending, *self._finishing])

    def reclaim_leaks(self) -> int:
        """When idle: quarantine pages that no living request holds, so that a leak is counted and never reused."""
        assert self.idle, "only an idle engine can tell a leak from a page in use"
        return self._quarantine_leaks()

    def _quarantine_leaks(self) -> int:
        lost = reclaim_leaks(self.held)
        self.counters.add("leaked_pages", lost)
        return lost

    def state(self, now: float) -> SchedulerState:
        arrivals = [req.arrival for req in self.waiting]
        return SchedulerState(
            step=self._step,
            num_running=self.num_running,
            num_waiting=len(self.waiting),
            num_waiting_tokens=self._num_waiting_tokens,
            oldest_wait_s=now - min(arrivals) if arrivals else 0.0,
            pools=tuple(pool_usage(slots, cached) for slots, cached in self.held.pools),
            counters=Counters({**self.counters, **self.held.counters}),
            page_map=page_map(self.held.kv),
        )


def _failure(error: ForebayError) -> Failure:
    return Failure(type(error).__name__, error.code, error.message)


def _not_finite(req: Request) -> NumericalError:
    return NumericalError(
        f"what the model computed after at most {len(req.tokens)} tokens of this request was not finite (NaN or "
        "infinite); other requests are not affected: check the checkpoint, or try --dtype float32"
    )

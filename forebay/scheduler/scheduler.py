"""The scheduler: a state machine without clock, sockets, tensors or processes.

`plan` decides a step from what is known, `commit` learns what came of it; several plans may be out at once (overlap),
and commits come in the order of the plans. Time is an argument. The same calls give the same decisions.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from forebay.base.errors import EngineError, ForebayError, InvalidRequest, NumericalError, RequestTimeout
from forebay.base.log import event, get_logger
from forebay.base.units import ceil_div
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.slots import PAD, Ids
from forebay.requests.request import Request, Status
from forebay.requests.schedule_batch import ScheduleBatch
from forebay.requests.step_plan import StepPlan, StepResult, TokenLogprob
from forebay.requests.updates import CacheReport, Failure, FinishReason, Update
from forebay.scheduler.admission import AdmissionPass, NewTokenRatio
from forebay.scheduler.audit import audit
from forebay.scheduler.door import check_fits, check_room, overdue
from forebay.scheduler.plan_builder import build_plan
from forebay.scheduler.policy import rank, victim
from forebay.scheduler.residency import Residencies
from forebay.scheduler.state import Counters, SchedulerState, page_map, pool_usage
from forebay.scheduler.suspects import Suspects, blamed_on

log = get_logger("scheduler")


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
        self.running = ScheduleBatch(max(8, config.max_running_requests))
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
        extends, admitted = self._plan_extends(now, may_admit)
        decoding = self.running.reqs if active is None else [self.running.reqs[i] for i in active.tolist()]
        if not extends.reqs and not decoding:
            if may_admit:
                self._end_who_is_stuck()
            return None
        self._step += 1
        plan = build_plan(self._step, extends, self.running, active, admitted, self.held)
        self._flights.append(_Flight(plan, extends.reqs + decoding))
        self.held.launched(self._step)
        self._launch_extends(extends)
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
        batch = self.running
        active: Ids | None = None
        if self._flights and (batch.seq_lens_cpu >= batch.max_kv_lens_cpu).any():
            active = np.flatnonzero(batch.seq_lens_cpu < batch.max_kv_lens_cpu)
        openers = self.held.page_openers(batch, active)
        excess = len(openers) - self.held.available_pages
        if excess > 0:
            youngest = sorted(openers.tolist(), key=lambda i: self._rank(batch.reqs[i]))[-excess:]
            everyone = np.arange(len(batch)) if active is None else active
            active = np.setdiff1d(everyone, youngest)
        return active

    def _make_room_to_decode(self) -> bool:
        """Retract requests until the others can decode; True when none had to go, so that more may be admitted."""
        roomy = True
        finishing = sum(req.num_pages for req in self._finishing)
        while self._pages_short() > self.held.leaving_pages + finishing and self.num_running > 1:
            self._retract(victim([*self.running.reqs, *self.extending], self.config.schedule_policy))
            roomy = False
        return roomy

    def _pages_short(self) -> int:
        batch = self.running
        if not len(batch):
            return 0
        live = np.flatnonzero(batch.seq_lens_cpu < batch.max_kv_lens_cpu) if self._flights else None
        return len(self.held.page_openers(batch, live)) - self.held.available_pages

    def _retract(self, req: Request) -> None:
        """Take a request's memory and let it wait. What it computed is copied to the host where that is the cheaper
        way to have it again; what else of it the cache has stays there as long as there is room."""
        self._remove(req)
        if not req.wants_prompt_logprobs and self.held.keep(req):
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
        self.held.release(req, req.committed_len)
        req.move(Status.WAITING)
        req.resume_after = self.held.last_launched
        self._enqueue(req)

    def _plan_extends(self, now: float, may_admit: bool) -> tuple[ScheduleBatch, list[Request]]:
        """Cut this step's chunks: first of the prompts under way, then of whoever can be admitted."""
        budget = self.config.chunked_prefill_size
        if len(self.running):
            budget = min(budget, self.config.mixed_chunk_size)
        reqs: list[Request] = []
        stops: list[int] = []
        self.held.slide(self.extending)
        for req in self.extending:
            with blamed_on(req):
                budget = self._cut(req, budget, reqs, stops)
        admitted: list[Request] = []
        if self.waiting and may_admit and budget > 0:
            admission = AdmissionPass(self.config, self.held, self.running, self.extending, self.ratio.value)
            with closing(admission.run(self._candidates(), budget)) as started:
                for req, report in started:
                    with blamed_on(req):
                        self._start(req, report, now)
                        admitted.append(req)
                        budget = self._cut(req, budget, reqs, stops)
        batch = ScheduleBatch(max(1, len(reqs)))
        batch.prepare_for_extend(reqs, stops)
        return batch, admitted

    def _candidates(self) -> list[Request]:
        if not self.suspects:
            return self.waiting
        return [req for req in self.waiting if req in self.suspects.on_trial]

    def _cut(self, req: Request, budget: int, reqs: list[Request], stops: list[int]) -> int:
        stop = min(req.extend_target, req.kv_len + budget)
        if stop == req.kv_len:
            return budget
        stop = self.held.limit(req, stop)
        self.held.extend(req, stop)
        reqs.append(req)
        stops.append(stop)
        return budget - (stop - req.kv_len)

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

    def _launch_extends(self, extends: ScheduleBatch) -> None:
        """The chunks are on their way: requests whose last chunk this is decode from the next step on."""
        complete: list[int] = []
        for i, (req, stop) in enumerate(zip(extends.reqs, extends.seq_lens_cpu.tolist(), strict=True)):
            req.kv_len = stop
            if stop == req.extend_target:
                complete.append(i)
                req.move(Status.DECODING)
                self.extending.remove(req)
        if complete:
            extends.filter_batch(np.array(complete, dtype=np.int64))
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
        self.held.committed(plan.step)
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
        accused = [(req, req.committed_len + 1) for req in ran]
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
            self._learn_holdings()
            self.held.start_over([req for req in self.requests.values() if req.pin], self._finishing, plans)
            audit(self.held, [])
        except Exception as error:
            log.error(event("books_cleared", effect="the prefix cache is empty"), exc_info=error)
            self.counters.add("books_cleared")
            self.held.clear(plans)
        self.running = ScheduleBatch(max(8, self.config.max_running_requests))
        self.extending, self._finishing = [], []
        for req in self.requests.values():
            if req.status is not Status.WAITING:
                req.move(Status.WAITING)
            req.pin, req.req_pool_idx, req.num_pages, req.tracking = None, PAD, 0, None
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
        if self._flights or self._finishing or any(self.held.leaving):
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
                self.held.release(req, None if req in failed else req.kv_len)

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
            req.kv_committed = int(plan.seq_lens[i])
            req.last_progress = now
            self.counters.add("computed_prompt_tokens", int(plan.q_lens[i]))
            self.held.adopt(req, req.kv_committed)

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
            self.held.kept.drop(req)
            return update
        self._remove(req, was)
        if reason is not FinishReason.ERROR and self.held.is_finishing(req):
            self._finishing.append(req)
        else:
            self.held.release(req, None if reason is FinishReason.ERROR else req.committed_len)
        return update

    def _remove(self, req: Request, status: Status | None = None) -> None:
        """Take an admitted request, which has or had this status, out of its batch, and learn from that what it has."""
        if (status or req.status) is Status.EXTENDING:
            self.extending.remove(req)
            return
        i = self.running.index_of(req)
        self._learn(i)
        self.running.filter_batch(np.delete(np.arange(len(self.running)), i))

    # -- looking after itself -------------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Drop every prefix that no request holds; how many pages."""
        return self.held.cache.flush()

    def audit(self) -> None:
        """Raise unless everything has exactly one holder (C8). Costs O(pool): for tests and idle moments."""
        self._learn_holdings()
        audit(self.held, [*self.running.reqs, *self.extending, *self._finishing])

    def _learn_holdings(self) -> None:
        """Tell the running requests what their batch knows of them."""
        for i in range(len(self.running)):
            self._learn(i)

    def _learn(self, i: int) -> None:
        req = self.running.reqs[i]
        req.kv_len = int(self.running.seq_lens_cpu[i])
        req.num_pages = ceil_div(req.kv_len, self.config.page_size)
        req.window_start = int(self.running.window_starts_cpu[i])

    def reclaim_leaks(self) -> int:
        """When idle: quarantine pages that no living request holds, so that a leak is counted and never reused."""
        assert self.idle, "only an idle engine can tell a leak from a page in use"
        return self._quarantine_leaks()

    def _quarantine_leaks(self) -> int:
        lost = self.held.reclaim_leaks()
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

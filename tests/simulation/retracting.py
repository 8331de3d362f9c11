"""A scheduler that takes memory away, and lets requests sit out, more often than it has to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from forebay.base.errors import ForebayError
from forebay.config.engine_config import SchedulerConfig
from forebay.memory.slots import Ids
from forebay.requests.pictures import Picture
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.scheduler.admission import MAX_RETRACTIONS
from forebay.scheduler.grammars import Grammars
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.preemption import Preemption
from forebay.scheduler.proposer import Proposer
from forebay.scheduler.queues import Blocked, by_rank
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler
from tests.simulation.liveness import Liveness


class Watcher(Protocol):
    """Is told of the calls of an engine core, and raises what is to go wrong, or is wrong."""

    def disturbed(self, at: str, plan: StepPlan | None = None) -> None: ...

    def planned(self, plan: StepPlan | None, width: int) -> None: ...

    def committing(self, plan: StepPlan, result: StepResult) -> None: ...

    def committed(self, plan: StepPlan, result: StepResult) -> None: ...

    def failing(self, plan: StepPlan) -> None: ...

    def recovering(self, culprit: Request | None) -> None: ...

    def count_failure(self) -> None:
        """Of a failure that smaller groups will tell nothing more about."""

    def expire(self, run: Callable[[], None]) -> None: ...


class RetractingScheduler(Scheduler):
    """Takes the memory of the last in rank in every `every`-th plan, needed or not; 0 for never. It spares whoever has
    been retracted as often as the scheduler promises at most, and waits until the host knows how long its row is.

    Where `skips`, whose row has changed sits a step out while others decode, as it would if pages were short: what the
    plan tells the device is then about a request that is not in it. A `watcher` sees every call.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        proposer: Proposer | None = None,
        handoff: Handoff | None = None,
        grammars: Grammars | None = None,
        *,
        every: int = 0,
        skips: bool = False,
    ) -> None:
        super().__init__(config, proposer, handoff, grammars)
        self.every, self.skips = every, skips
        self.preemption = RetractingPreemption(self)
        self.liveness: Liveness | None = None
        self.watcher: Watcher | None = None
        self.added: Request | None = None  # at last

    # -- what it is called for ----------------------------------------------------------------------------------------

    def add(self, req: Request, now: float, pictures: Sequence[Picture] = ()) -> None:
        super().add(req, now, pictures)
        self.added = req

    def abort(self, request_id: int) -> None:
        if self.watcher:
            self.watcher.disturbed("abort")
        super().abort(request_id)

    def plan(self, now: float, width: int = 1, mixed_limit: int = NO_LIMIT) -> StepPlan | None:
        if self.watcher:
            self.watcher.disturbed("plan")
        if self.liveness:
            self.liveness.mixed_limit = mixed_limit
        plan = super().plan(now, width, mixed_limit)
        if self.watcher:
            self.watcher.planned(plan, width)
            self.watcher.disturbed("planned", plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        if not self.watcher:
            super().commit(plan, result, now)
            return
        self.watcher.disturbed("commit")
        self.watcher.committing(plan, result)
        super().commit(plan, result, now)
        self.watcher.committed(plan, result)

    def fail(self, plan: StepPlan, error: ForebayError) -> None:
        num_requests = len(self.requests)
        if self.watcher:
            self.watcher.failing(plan)
        super().fail(plan, error)
        if self.watcher and (len(self.requests) < num_requests or not self.queues.suspects.groups):
            self.watcher.count_failure()

    def recover(self, error: ForebayError, culprit: Request | None) -> bool:
        if self.watcher:
            self.watcher.recovering(culprit)
        several = super().recover(error, culprit)
        if self.watcher and not several:
            self.watcher.count_failure()
        return several

    def expire(self, now: float) -> None:
        run = partial(super().expire, now)
        if self.watcher:
            self.watcher.expire(run)
        else:
            run()


class RetractingPreemption(Preemption):
    """The preemption of a `RetractingScheduler`, which says when to retract one request more."""

    def __init__(self, scheduler: RetractingScheduler) -> None:
        super().__init__(scheduler.queues, scheduler.handoff, scheduler.ratio)
        self._scheduler, self._num_plans, self._due = scheduler, 0, False

    def retract(self, req: Request) -> None:
        if self._scheduler.liveness:
            self._scheduler.liveness.gives_way(req)
        super().retract(req)

    def displace(self, blocked: Blocked) -> None:
        liveness = self._scheduler.liveness
        ranked = sorted([*self._queues.running.reqs, *self._queues.extending], key=by_rank)
        held = liveness.fairness.held(ranked) if liveness else {}
        decoding = {req for req in ranked if req.status is Status.DECODING}
        super().displace(blocked)
        for req in ranked:
            if liveness and req.maybe_allocation is None:
                liveness.fairness.displaced(req, blocked.req, ranked, decoding, held)

    def make_room(self) -> tuple[Ids | None, bool]:
        active, roomy = super().make_room()
        queues, every = self._queues, self._scheduler.every
        self._num_plans += 1
        due, self._due = self._due or (every > 0 and self._num_plans % every == 0), False
        candidates = [r for r in [*queues.running.reqs, *queues.extending] if r.num_retractions < MAX_RETRACTIONS]
        if due and candidates:
            last = max(candidates, key=by_rank)
            if self._scheduler.liveness:
                self._scheduler.liveness.forced()
            self._due = last.allocation.num_drafts > 0
            if self._due:
                return self._without(last, active), False
            super().retract(last)
            active, _ = super().make_room()
            roomy = False  # as after any other retraction
        roomy = roomy or not queues.num_running
        written, _, _ = queues.pools.draft.row_writes
        if not (self._scheduler.skips and len(written)):
            return active, roomy
        changed = np.isin(queues.running.req_pool_indices_cpu, written)
        indices = np.arange(len(queues.running)) if active is None else active
        others = indices[~changed[indices]]
        return (others if len(others) else active), roomy

    def _without(self, req: Request, active: Ids | None) -> Ids:
        indices = np.arange(len(self._queues.running)) if active is None else active
        return np.setdiff1d(indices, [self._queues.running.reqs.index(req)])

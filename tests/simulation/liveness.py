"""Who may start, who gives way, and who ends when: the rules of C26 and C27, reckoned apart from the scheduler's own.

What is looked at is the scheduler's queues and what its pools have left; when a request came, last got on and was
overtaken is remembered here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forebay.config.engine_config import SchedulePolicy, SchedulerConfig
from forebay.requests import account
from forebay.requests.request import Request
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Update
from forebay.scheduler import admission
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler
from tests.simulation.fairness import Fairness
from tests.simulation.hash_step import HashStep

if TYPE_CHECKING:
    from tests.simulation.faulty_device import CopyStep
from tests.simulation.violation import Violation, require

__all__ = ["Liveness", "Violation", "require"]


@dataclass(slots=True)
class _Times:
    """What is remembered of a request."""

    arrival: float
    progress: float  # it started, a chunk of it was computed, or it got a token
    started: bool = False
    overtaken: int = 0


class Liveness:
    """Told of every call of the scheduler; raises Violation."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler) -> None:
        self._config, self._scheduler = config, scheduler
        self._times: dict[int, _Times] = {}
        self._num_retracted = 0  # in the plan that is being made
        self.mixed_limit = NO_LIMIT  # of that plan
        self._being_encoded: list[Request] = []  # whose pictures were encoded while they waited, before this plan
        self.fairness = Fairness(config, scheduler)

    # -- what happens -------------------------------------------------------------------------------------------------

    def added(self, req: Request, now: float) -> None:
        self._times[req.id] = _Times(now, now)
        self.fairness.added(req)

    def heard(self, updates: Iterable[Update], now: float) -> None:
        for update in updates:
            self.fairness.heard(update)
            if update.finish:
                self._times.pop(update.request_id, None)
            elif update.token_ids:
                self._times[update.request_id].progress = now

    def computed(self, plan: StepPlan, step: HashStep | CopyStep, now: float) -> None:
        """A step has completed: those whose prompts it extended, and who still hold what it wrote, got on."""
        extended = set(step.tenants[: plan.num_extends].tolist())
        for req in [*self._scheduler.queues.extending, *self._scheduler.queues.running.reqs]:
            if req.id in extended:
                self._times[req.id].progress = now

    def launched(self, plan: StepPlan) -> None:
        """A plan on the way to a halt, in which nobody starts."""
        self.fairness.launched(plan)

    def planned(self, plan: StepPlan | None, now: float) -> None:
        """A plan was made, or none could be."""
        scheduler = self._scheduler
        rows = set(plan.rows[: plan.num_extends].tolist()) if plan else set()
        under_way = [req for req in scheduler.requests.values() if req.maybe_allocation and req.allocation.row in rows]
        under_way += [req for req in scheduler.queues.extending if req.allocation.row not in rows]
        unready = scheduler.queues.constraints.unready
        ready = (req for req in sorted(scheduler.queues.waiting, key=self._rank) if req.id not in unready)
        waiting = [req for req in ready if not self._may_wait(req, under_way)]
        if scheduler.queues.suspects.groups:  # nobody else runs until it is known who is to blame for a failed step
            waiting = [req for req in waiting if req in scheduler.queues.suspects.under_test]
        admissions = [admission for admission in plan.admissions if not admission.prebuilt] if plan else []
        started = [scheduler.requests[admission.request_id] for admission in admissions]
        self.fairness.planned(plan, started, [] if self._num_retracted or scheduler.queues.suspects.groups else waiting)
        self._overtake(started, waiting)
        for req in started:
            times = self._times[req.id]
            times.started, times.progress = True, now
        self._being_encoded = [*scheduler.queues.encoding.values()]
        retracted, self._num_retracted = self._num_retracted, 0
        if waiting and not retracted and not self._makes_way():
            for tenant in dict.fromkeys(req.tenant for req in waiting):
                self._check_head([req for req in waiting if req.tenant == tenant], plan, started)

    def gives_way(self, req: Request) -> None:
        """The scheduler takes a request's memory, because others could not decode without it."""
        self._num_retracted += 1
        running = [*self._scheduler.queues.running.reqs, *self._scheduler.queues.extending]
        require(
            len(running) > 1 or self._scheduler.handoff.has_arrivals,
            f"{req} is the only one running and gives way to nobody",
        )
        last = self._last_of(running)
        require(req is last, f"{req} gives way, and {last} is to give way before it")
        short = self._pages_short()
        require(short > 0, f"{req} gives way although {-short} pages more than wanted can be had, or will be soon")

    def _last_of(self, running: list[Request]) -> Request:
        """Of the tenant that has the most pages for its weight, of those that have more than one request; where none
        has, of all."""
        tenants = {req.tenant: [other for other in running if other.tenant == req.tenant] for req in running}
        several = [own for own in tenants.values() if len(own) > 1]
        if not several:
            return max(running, key=self._rank)
        loads = [sum(req.allocation.num_pages / req.account.weight for req in own) for own in several]
        heaviest = [own for own, load in zip(several, loads, strict=True) if load >= max(loads) - 1e-9]
        return max((max(own, key=self._rank) for own in heaviest), key=self._rank)

    def forced(self) -> None:
        """A retraction that the simulation asked for."""
        self._num_retracted += 1

    def due(self, now: float) -> set[int]:
        """The requests whose time is up."""
        return {request_id for request_id, times in self._times.items() if self._is_late(request_id, times, now)}

    def expired(self, updates: Iterable[Update], due: set[int], now: float) -> None:
        """Call before `heard`: exactly those that were `due` have ended."""
        ended = {update.request_id for update in updates}
        require(ended == due, f"at {now} requests {ended} timed out; it was time for {due}: {self._times}")

    # -- the rules ----------------------------------------------------------------------------------------------------

    def _is_late(self, request_id: int, times: _Times, now: float) -> bool:
        config = self._config
        if now - times.arrival > config.request_timeout_s:
            return True
        if not times.started:
            return now - times.arrival > config.queue_timeout_s
        return now - times.progress > config.stall_timeout_s

    def _rank(self, req: Request) -> tuple[int, int]:
        """Requests are numbered in the order in which they came."""
        return (-req.priority if self._config.schedule_policy is SchedulePolicy.PRIORITY else 0, req.id)

    def _may_wait(self, req: Request, under_way: list[Request]) -> bool:
        """Whether a step in flight still computes for the request, or a prompt under way will give it a part of its
        own."""
        return self._scheduler.memory.computes_for(req) or any(
            leader.cache_namespace == req.cache_namespace
            and admission.num_common(leader.tokens, req.tokens) >= admission.SHARE_WORTH_WAITING
            for leader in under_way
        )

    def _overtake(self, started: list[Request], waiting: list[Request]) -> None:
        """Whoever waits although it is ahead of one that starts has been overtaken: so often, and then no more."""
        before = {req.id: self._times[req.id].overtaken for req in waiting}
        for starter in started:
            for req in waiting:
                if self._rank(req) > self._rank(starter):
                    break
                if req.tenant != starter.tenant:
                    continue  # it had its turn; see `Fairness`
                require(
                    before[req.id] < admission.MAX_OVERTAKES, f"{starter} overtakes {req} after {before[req.id]} others"
                )
                self._times[req.id].overtaken += 1
                # What another that starts in this step took may have been the hit that brought it forward.
                # And one that was encoded while it waited had kept its place.
                fits = (
                    starter is started[0] and starter not in self._being_encoded and self._needs_no_more(req, starter)
                )
                require(not fits, f"{starter} starts although {req} is ahead of it and needs no more")

    def _needs_no_more(self, req: Request, starter: Request) -> bool:
        """Whether the room in which `starter` starts, with no hit, would have been enough for `req`."""
        report = starter.cache_report
        if req.num_retractions or self._times[starter.id].started or not report:
            return False  # the report is of the first start: this one may find what the one before left
        if (
            self._config.schedule_policy is SchedulePolicy.LPM
            and max(self._times[starter.id].overtaken, starter.overtaken) >= admission.MAX_OVERTAKES
        ):
            return False  # then it is the starter's turn
        # A hit that it is tried for first may be given up for lack of a slot when it starts.
        hits = [report.kv_tokens, *report.resumable.values()]
        return (
            0 in hits
            and self._pages(len(req.tokens)) <= self._pages(len(starter.tokens))
            and req.params.max_tokens <= starter.params.max_tokens
        )

    def _check_head(self, waiting: list[Request], plan: StepPlan | None, started: list[Request]) -> None:
        """Nobody waits in vain: where the first in rank has all that it could ever need, it starts."""
        scheduler, config, pools = self._scheduler, self._config, self._scheduler.pools
        head, encoded = waiting[0], [req for req in self._being_encoded if req is not waiting[0]]
        others = [*scheduler.queues.running.reqs, *scheduler.queues.extending, *encoded]
        own = [req for req in scheduler.queues.waiting if req.tenant == head.tenant]
        if config.schedule_policy is SchedulePolicy.LPM and len(own) > 1:
            return  # others may be tried first
        ahead = [req for req in own if self._rank(req) < self._rank(head)]
        strangers = [req for req in scheduler.queues.waiting if req.tenant != head.tenant]
        if len(ahead) > admission.MAX_PASSED:
            return
        if any(req.overtaken >= admission.MAX_OVERTAKES for req in (*ahead, *strangers)):
            return  # one of those may be what everybody waits for
        if self._budget_left(plan, started) <= 0 or self._num_free_rows <= len(encoded) or pools.scarce:
            return
        if head.num_retractions >= admission.MAX_RETRACTIONS and others:
            return
        need = self._pages(len(head.tokens)) + self._pages(head.max_kv_len - len(head.tokens) + 1)
        growth = sum(self._pages(req.max_kv_len - len(req.tokens) + 1) + 1 for req in others)
        growth += sum(self._pages(len(req.tokens)) for req in encoded)
        room = pools.kv.num_free + pools.cache.num_evictable
        require(need + growth > room, f"{head} waits although it needs {need} pages, the others {growth}, of {room}")

    @property
    def _num_free_rows(self) -> int:
        """Rows that no request will take that waits for a load."""
        return self._scheduler.pools.rows.available_size() - self._scheduler.memory.tiers.num_loading

    def _makes_way(self) -> bool:
        """Whether nobody may start before a request that is owed a place."""
        scheduler, blocked = self._scheduler, self._scheduler.queues.blocked
        if blocked is None or len(self._config.tenants) < 2:
            return False
        return scheduler.pools.steps.launched - blocked.req.account.waits_since >= account.PATIENCE

    def _budget_left(self, plan: StepPlan | None, started: list[Request]) -> int:
        """Prompt tokens that the plan could have computed besides its own."""
        if plan is None:
            return min(self._config.mixed_chunk_size, self.mixed_limit)
        extended = set(plan.rows[: plan.num_extends].tolist())
        under_way = [req for req in self._scheduler.requests.values() if req.maybe_allocation]
        mixed = any(req.allocation.row not in extended for req in self._scheduler.queues.running.reqs)
        most = min(self._config.mixed_chunk_size, self.mixed_limit) if mixed else self._config.chunked_prefill_size
        scored = {req.allocation.row for req in under_way if req.wants_prompt_logprobs}
        costs = [admission.SCORED_COST if row in scored else 1 for row in plan.rows[: plan.num_extends].tolist()]
        used = int(np.dot(plan.q_lens[: plan.num_extends], costs)) + self._fetched(plan)
        # Whoever starts counts with all that it has to compute, wherever its first chunk has to end.
        for req in started:
            used += max(0, req.allocation.extend_target - req.allocation.kv_bound)
        return min(most, self._config.chunked_prefill_size) - used

    def _fetched(self, plan: StepPlan) -> int:
        """Tokens that are computed in the time in which the plan fetches from other tiers of the cache."""
        kinds = self._config.kinds
        sizes = [
            sum(len(ids) * kinds.slot_bytes.get(kind, 0) for kind, ids in copy.slots.items())
            for copy in plan.host.fetches
        ]
        return sum(-(-num_bytes // kinds.recompute_bytes_per_token) for num_bytes in sizes)

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.page_size)

    def _pages_short(self) -> int:
        """Pages that the next tokens open, less those that can be had or that steps in flight will release."""
        scheduler, pools = self._scheduler, self._scheduler.pools
        rows = scheduler.queues.running.req_pool_indices_cpu
        room = np.count_nonzero(pools.rows.req_to_token[rows], axis=1) * self._config.page_size
        growing = (
            scheduler.queues.running.tokens_left > 0 if scheduler.queues.flights else np.ones(len(rows), dtype=bool)
        )
        wanted = int(np.count_nonzero(growing & (pools.table.kv_bound[rows] >= room)))
        steps = [freed for freed in pools.deferred.entries if freed.ticket is None]  # nobody counts on transfers
        leaving = sum(len(freed.pages) + (freed.pin.num_pages if freed.pin else 0) for freed in steps)
        leaving += sum(req.allocation.num_pages for req in scheduler.queues.finishing)
        return wanted - pools.kv.num_free - pools.cache.num_evictable - leaving

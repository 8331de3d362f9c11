"""Where every request stands, from its arrival to its end."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forebay.config.engine_config import SchedulePolicy, SchedulerConfig
from forebay.requests.request import Request, Status
from forebay.requests.schedule_batch import Chunk, ScheduleBatch
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import CacheReport
from forebay.scheduler.residency import Residencies
from forebay.scheduler.state import COUNTED
from forebay.scheduler.suspects import Suspects


class Flight(NamedTuple):
    """A launched step: whose results are awaited, in the plan's order."""

    plan: StepPlan
    reqs: list[Request]


class Queues:
    """The living requests (`requests`, by id), and what they hold of the engine's memory (`held`).

    Those that decode stand in `running`; those whose known tokens still lack KV in `extending`; the others wait, in the
    order of their rank. In `finishing` are some that have ended, because a step in flight makes a state of theirs worth
    keeping. `flights` are the launched steps.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.held = Residencies(config)
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.extending: list[Request] = []
        self.running = ScheduleBatch(self.held.table)
        self.finishing: list[Request] = []
        self.flights: deque[Flight] = deque()
        self.num_waiting_tokens = 0
        self.suspects = Suspects()
        self.counters = dict.fromkeys(COUNTED, 0.0)  # numbers that only grow; any other name is a KeyError

    @property
    def idle(self) -> bool:
        return not (self.requests or self.flights)

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.extending)

    @property
    def candidates(self) -> list[Request]:
        """Who may start now: while somebody is on trial, nobody else."""
        if not self.suspects.groups:
            return self.waiting
        return [req for req in self.waiting if req in self.suspects.on_trial]

    def rank(self, req: Request) -> tuple[int, int]:
        """A request's place in a total order that never changes: the smaller, the more it is served.

        Because the order is fixed, preemption cannot cycle: the first in it is never a victim, so it finishes.
        """
        return (-req.priority if self.config.schedule_policy is SchedulePolicy.PRIORITY else 0, req.order)

    @property
    def victim(self) -> Request:
        """Who gives way when memory runs out: the last in rank of all that run, be it the one that needs the memory."""
        return max([*self.running.reqs, *self.extending], key=self.rank)

    # -- moving -------------------------------------------------------------------------------------------------------

    def enqueue(self, req: Request) -> None:
        insort(self.waiting, req, key=self.rank)
        self.num_waiting_tokens += len(req.tokens)

    def start(self, req: Request, report: CacheReport, now: float) -> None:
        """A waiting request has been admitted; `report` says what of it was cached."""
        self.waiting.remove(req)
        self.num_waiting_tokens -= len(req.tokens)
        req.move(Status.EXTENDING)
        req.last_progress = now
        req.prompt_logprobs = []  # a retraction before the first token: every position is computed again
        insort(self.extending, req, key=self.rank)
        if req.cache_report is None:
            req.cache_report = report
            self.counters["cached_tokens"] += report.cached_tokens
            self.counters[f"misses.{report.miss_reason}"] += 1
        else:
            self.counters["recomputed_tokens"] += len(req.tokens) - report.cached_tokens

    def launch_extends(self, chunks: Sequence[Chunk]) -> None:
        """The chunks are on their way: requests whose last chunk this is decode from the next step on."""
        extends = ScheduleBatch(self.held.table)
        extends.prepare_for_extend(chunks)
        extends.filter_batch(np.flatnonzero([stop == req.residency.extend_target for req, _, stop in chunks]))
        for req in extends.reqs:
            req.move(Status.DECODING)
            self.extending.remove(req)
        self.running.merge_batch(extends)

    def remove(self, req: Request, status: Status | None = None) -> None:
        """Take an admitted request, which has or had this status, out of its batch."""
        if (status or req.status) is Status.EXTENDING:
            self.extending.remove(req)
        else:
            self.running.remove(req)

    def set_back(self, req: Request) -> None:
        """Let a request that has left its batch wait; what completed steps computed for it stays in the cache."""
        self.held.release(req, req.residency.kv_committed)
        req.move(Status.WAITING)
        req.resume_after = self.held.steps.launched
        self.enqueue(req)

    def everybody_waits(self) -> None:
        """Nobody holds anything any more, and nothing is in flight."""
        self.flights.clear()
        self.running = ScheduleBatch(self.held.table)
        self.extending, self.finishing = [], []
        for req in self.requests.values():
            if req.status is not Status.WAITING:
                req.move(Status.WAITING)
            req.held = None
            req.resume_after = 0
        self.waiting = sorted(self.requests.values(), key=self.rank)
        self.num_waiting_tokens = sum(len(req.tokens) for req in self.waiting)

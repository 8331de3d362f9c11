"""Halting a scheduler, so that its memory can be released or its weights changed, and resuming it.

During a halt no request is admitted and steps in flight complete. Running requests finish, are retracted or are
aborted. Then no step is in flight, no request holds memory, and copies that must survive are in host memory.
"""

from __future__ import annotations

from enum import StrEnum

from forebay.base.errors import Unavailable
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.request import Status
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler.handoff import ASLEEP
from forebay.scheduler.journal import Forgotten, Halted, HaltPlanning, Resumed, Reweighed
from forebay.scheduler.queues import Flight
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler
from forebay.scheduler.suspects import Suspects


class Mode(StrEnum):
    """The treatment of running requests at a halt."""

    WAIT = "wait"  # they finish
    RETRACT = "retract"  # they wait with their tokens, and are resumed later
    ABORT = "abort"  # they end with an error


class Halt:
    """The halt of one scheduler: call `plan` instead of the scheduler's own until it is `done`. New requests are still
    queued, and waiting requests wait."""

    def __init__(self, scheduler: Scheduler, mode: Mode) -> None:
        self._scheduler, self._queues, self.mode = scheduler, scheduler.queues, mode
        if self._queues.journal is not None:
            self._queues.journal(Halted(mode.value))
        self._queues.admits = False
        scheduler.handoff.drain()

    @property
    def done(self) -> bool:
        """True once nothing runs, is in flight, is transferred or written to the cache."""
        queues = self._queues
        active = queues.num_running or queues.flights or queues.transferring
        return not (active or self._scheduler.handoff.tickets.num_open or queues.pools.draft.reads_released)

    def plan(self, now: float, width: int = 1, mixed_limit: int = NO_LIMIT) -> StepPlan | None:
        """Decide the next step of the halt, or return None if a commit must come first, or if it is `done`."""
        queues = self._queues
        self._scheduler.handoff.drain()
        if queues.journal is not None:
            queues.journal(HaltPlanning(now, width, mixed_limit))
        if self.mode is Mode.WAIT:
            if (plan := self._scheduler.plan(now, width, mixed_limit)) is not None:
                return plan
        elif queues.flights:
            return None
        else:
            self._end_running()
        if queues.num_running or queues.flights or not queues.pools.draft.reads_released:
            return None
        plan = queues.memory.launch(NO_IDS, [])  # without requests: it copies retracted memory to the host
        queues.flights.append(Flight(plan, []))
        if queues.journal is not None:
            queues.journal(plan)
        return plan

    def _end_running(self) -> None:
        """Abort or retract all requests that run or are being transferred."""
        queues, finish = self._queues, self._scheduler.outputs.finish
        stopped = Unavailable("the engine was told to stop what it was at: send it again", code="aborted")
        for req in [*queues.running.reqs, *queues.extending, *queues.transferring]:
            if self.mode is Mode.ABORT:
                finish(req, FinishReason.ERROR, Failure.of(stopped))
            elif req.status is Status.TRANSFERRING:
                finish(req, FinishReason.ERROR, ASLEEP)
            else:
                self._scheduler.preemption.suspend(req)


def resume(scheduler: Scheduler, now: float) -> None:
    """Admit requests again. The time of the halt does not count towards their stall time-out."""
    if scheduler.queues.journal is not None:
        scheduler.queues.journal(Resumed(now))
    scheduler.queues.admits = True
    for req in scheduler.queues.waiting:
        req.last_progress = now
    scheduler.handoff.resume()


def forget_caches(scheduler: Scheduler, now: float) -> None:
    """Reset all pools after a halt, because the caches on the device are released. Copies on the host stay (C25)."""
    _forget(scheduler, now, to_host=False)
    scheduler.memory.clear([], committed=scheduler.pools.steps.committed, released=True)


def keep_cached(scheduler: Scheduler, now: float) -> dict[str, Ids]:
    """Release all memory, but keep as much of the cache as fits into host memory.

    Returns the places of the kept cache, by kind. Their content must be back there before the next step.
    """
    _forget(scheduler, now, to_host=True)
    return scheduler.memory.keep_cached()


def _forget(scheduler: Scheduler, now: float, *, to_host: bool) -> None:
    """End the retentions that are over: an idle engine plans no step that does."""
    if scheduler.queues.journal is not None:
        scheduler.queues.journal(Forgotten(now, to_host))
    for retention in scheduler.memory.tiers.retentions:
        retention.expire(now)


def weights_changed(scheduler: Scheduler, version: int) -> None:
    """After a halt: drop all that was computed with other weights. A request that has output restarts from its prompt,
    and its client gets an update that says so: no answer mixes two versions."""
    queues = scheduler.queues
    if queues.journal is not None:
        queues.journal(Reweighed(version))
    queues.weight_version, queues.suspects = version, Suspects()
    scheduler.memory.clear([])
    for req in (*queues.pending, *queues.waiting):
        if req.num_output:
            if scheduler.proposer:
                scheduler.proposer.ended(req)
            if req.params.grammar:
                queues.constraints.begin(req)
            queues.num_waiting_tokens -= req.num_output
            del req.tokens[req.num_prompt :]
            scheduler.outputs.updates.append(Update(req.id, [], restarted=True))
        req.compute_with(version)
        req.cache_report = None

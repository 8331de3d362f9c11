"""How a scheduler comes to a halt, so that its memory can be released or its weights changed, and goes on.

Nobody starts any more, steps in flight land, and who runs finishes, is retracted or ends. Then nothing is in flight,
nobody holds anything, and copies that are to outlast it are in host memory.
"""

from __future__ import annotations

from enum import StrEnum

from forebay.base.errors import Unavailable
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.request import Status
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Failure, FinishReason, Update
from forebay.scheduler.handoff import ASLEEP
from forebay.scheduler.queues import Flight
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler
from forebay.scheduler.suspects import Suspects


class Mode(StrEnum):
    """The treatment of running requests at a halt."""

    WAIT = "wait"  # they finish
    RETRACT = "retract"  # they wait with their tokens, and go on later
    ABORT = "abort"  # they end with an error


class Halt:
    """One scheduler's way to a halt: `plan` instead of the scheduler's own until it is `done`. Who waits, waits;
    requests are taken as ever."""

    def __init__(self, scheduler: Scheduler, mode: Mode) -> None:
        self._scheduler, self.mode = scheduler, mode
        scheduler.admits = False
        scheduler.handoff.rest()

    @property
    def done(self) -> bool:
        """True once nothing runs, is in flight, is transferred or written to the cache."""
        s = self._scheduler
        return not (s.num_running or s.flights or s.transferring or s.handoff.num_open or s.pools.draft.saves)

    def plan(self, now: float, width: int = 1, mixed_limit: int = NO_LIMIT) -> StepPlan | None:
        """The next step on the way; None where the next thing is a commit, or `done`."""
        s = self._scheduler
        s.handoff.rest()
        if self.mode is Mode.WAIT:
            if (plan := s.plan(now, width, mixed_limit)) is not None:
                return plan
        elif s.flights:
            return None
        else:
            self._clear_out()
        if s.num_running or s.flights or not s.pools.draft.saves:
            return None
        plan = s.memory.launch(NO_IDS, [])  # of nobody: what leaves is copied to the host
        s.flights.append(Flight(plan, []))
        return plan

    def _clear_out(self) -> None:
        s = self._scheduler
        stopped = Unavailable("the engine was told to stop what it was at: send it again", code="aborted")
        for req in [*s.running.reqs, *s.extending, *s.transferring]:
            if self.mode is Mode.ABORT:
                s.finish(req, FinishReason.ERROR, Failure.of(stopped))
            elif req.status is Status.TRANSFERRING:
                s.finish(req, FinishReason.ERROR, ASLEEP)
            else:
                s.suspend(req)


def go_on(scheduler: Scheduler, now: float) -> None:
    """Requests start again. The time in which none could is no delay of theirs."""
    scheduler.admits = True
    for req in scheduler.waiting:
        req.last_progress = now
    scheduler.handoff.go_on()


def forget_caches(scheduler: Scheduler) -> None:
    """After a halt: the device's caches are gone, and everything is as after `clear`. What the host has stays (C25)."""
    scheduler.memory.clear([], committed=scheduler.pools.steps.committed, released=True)


def keep_cached(scheduler: Scheduler) -> dict[str, Ids]:
    """Release all memory, but keep as much of the cache as fits into host memory.

    Returns the places of the kept cache, by kind. Their content must be back there before the next step.
    """
    return scheduler.memory.keep_cached()


def weights_changed(scheduler: Scheduler, version: int) -> None:
    """After a halt: all that was computed with other weights counts for nothing. Who has had tokens of theirs begins
    again from the prompt and is told so: no answer mixes two versions."""
    scheduler.weight_version, scheduler.suspects = version, Suspects()
    scheduler.memory.clear([])
    for req in (*scheduler.pending, *scheduler.waiting):
        if req.num_output:
            if scheduler.proposer:
                scheduler.proposer.ended(req)
            if req.params.grammar:
                scheduler.constraints.begin(req)
            scheduler.num_waiting_tokens -= req.num_output
            del req.tokens[req.num_prompt :]
            scheduler.updates.append(Update(req.id, [], restarted=True))
        req.compute_with(version)
        req.cache_report = None

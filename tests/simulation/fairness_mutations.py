"""Bugs on purpose in who starts, who gives way, and whose time is up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forebay.base.errors import EngineError
from forebay.config.engine_config import SchedulePolicy, SchedulerConfig
from forebay.requests.request import Request, Status
from forebay.requests.updates import CacheReport
from forebay.scheduler import admission, scheduler
from forebay.scheduler.limits import overdue
from forebay.scheduler.memory.deferred import Deferred
from forebay.scheduler.queues import Queues, by_rank

Patch = pytest.MonkeyPatch


def a_retracted_request_is_queued_anew(patch: Patch) -> None:
    def mutated(req: Request, config: SchedulerConfig, now: float, admits: bool) -> EngineError | None:
        report = req.cache_report
        req.cache_report = None if req.num_retractions else report  # without one it has never started
        why = overdue(req, config, now, admits)
        req.cache_report = report
        return why

    patch.setattr(scheduler, "overdue", mutated)


def a_retracted_request_has_all_the_time(patch: Patch) -> None:
    def mutated(req: Request, config: SchedulerConfig, now: float, admits: bool) -> EngineError | None:
        return None if req.status is Status.WAITING and req.num_retractions else overdue(req, config, now, admits)

    patch.setattr(scheduler, "overdue", mutated)


def the_queue_counts_as_time_without_a_token(patch: Patch) -> None:
    start = Queues.start

    def mutated(self: Queues, req: Request, report: CacheReport, now: float) -> None:
        progress = req.last_progress
        start(self, req, report, now)
        req.last_progress = progress

    patch.setattr(Queues, "start", mutated)


def the_first_in_rank_gives_way(patch: Patch) -> None:
    victim = property(lambda self: min([*self.running.reqs, *self.extending], key=by_rank))
    patch.setattr(Queues, "victim", victim)


def only_those_who_decode_give_way(patch: Patch) -> None:
    patch.setattr(Queues, "victim", property(lambda self: max(self.running.reqs or self.extending, key=by_rank)))


def somebody_gives_way_for_pages_that_are_on_their_way_back(patch: Patch) -> None:
    patch.setattr(Deferred, "num_pages", 0)


def whoever_does_not_fit_is_overtaken_for_ever(patch: Patch) -> None:
    admit = admission.AdmissionPass._admit

    def mutated(self: admission.AdmissionPass, req: Request, *args: Any) -> Any:
        req.overtaken = 0
        return admit(self, req, *args)

    patch.setattr(admission.AdmissionPass, "_admit", mutated)


def lpm_passes_over_whoever_has_no_hit(patch: Patch) -> None:
    line = admission.AdmissionPass._line

    def mutated(self: admission.AdmissionPass, *args: Any) -> Iterator[Request]:
        if self._config.schedule_policy is not SchedulePolicy.LPM:
            yield from line(self, *args)
            return
        with Patch.context() as inside:
            inside.setattr(admission, "MAX_OVERTAKES", 1 << 30)
            reqs = list(line(self, *args))
        yield from reqs

    patch.setattr(admission.AdmissionPass, "_line", mutated)


FAIRNESS_MUTATIONS = {
    name: apply
    for name, apply in list(globals().items())
    if getattr(apply, "__module__", None) == __name__ and callable(apply)
}

"""Recovery from a failure: requests start over, suspects run alone, and requests that can never finish end."""

from __future__ import annotations

import numpy as np

from forebay.base.errors import EngineError, ForebayError
from forebay.base.log import event, get_logger
from forebay.memory.slots import CACHE, NO_IDS
from forebay.requests.request import Request, Status
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import Failure, FinishReason
from forebay.scheduler.audit import audit
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.journal import AdapterLost
from forebay.scheduler.limits import check_fits
from forebay.scheduler.output_processor import OutputProcessor
from forebay.scheduler.queues import Queues

log = get_logger("scheduler")

Ending = tuple[Request, ForebayError]
"""A request to end, and the error that it ends with."""


class Recovery:
    """Returns all requests to the waiting queue after a failure, and searches for the request that caused it."""

    def __init__(self, queues: Queues, outputs: OutputProcessor, handoff: Handoff) -> None:
        self._queues, self._outputs, self._handoff = queues, outputs, handoff

    def fail(self, plan: StepPlan, error: ForebayError) -> None:
        """Handle that the oldest launched step did not complete. Later steps are void, and their results discarded.

        A request that was alone in the step ends with `error`. If there were several, all start over and run again in
        smaller groups, so that only a request that fails alone ends, and the others get the same tokens.
        """
        queues = self._queues
        flight = queues.flights[0]
        assert flight.plan is plan, f"step {plan.step} failed before step {flight.plan.step} committed"
        queues.counters["failed_steps"] += 1
        suspected = flight.suspected
        self._start_over()
        living = [(req, length) for req, length in suspected if req.status is not Status.FINISHED]
        if len(suspected) > 1:
            queues.suspects.add_group(living)
            return
        self._outputs.finish_each((req, error) for req, _ in living)

    def recover(self, error: ForebayError, culprit: Request | None) -> bool:
        """Handle an `error` that was raised perhaps half-way through a call of the scheduler, in work for `culprit`
        alone if that is known. The results of steps in flight have been discarded.

        The culprit ends, and all other requests start over. Without one, the requests that ran become suspects. Return
        whether there are several: smaller groups isolate the culprit.
        """
        queues = self._queues
        queues.counters["recoveries"] += 1
        ran = [req for req in queues.requests.values() if req.status in (Status.EXTENDING, Status.DECODING)]
        if culprit is None and len(ran) == 1 and ran[0] in queues.suspects.under_test:
            culprit = ran[0]
        suspected = [(req, req.allocation.kv_committed + 1 if req.maybe_allocation else len(req.tokens)) for req in ran]
        self._start_over()
        if culprit is None:
            queues.suspects.add_group(suspected)
        elif queues.requests.get(culprit.id) is culprit:
            self._outputs.finish(culprit, FinishReason.ERROR, Failure.of(error), self._outputs.last_update(culprit))
        return culprit is None and len(suspected) > 1

    def _start_over(self) -> None:
        """Return every living request to the waiting queue, with its tokens; no step stays in flight.

        KV of completed steps stays in the cache. If the audit finds a wrong ledger, everything is freed instead.
        Transfers continue meanwhile, and slots that they may access are not free even then."""
        queues, memory = self._queues, self._queues.memory
        void, cleared = [flight.plan for flight in queues.flights], False
        queues.flights.clear()
        ran = [
            req for req in queues.requests.values() if req.maybe_allocation and req.status is not Status.TRANSFERRING
        ]
        try:
            memory.start_over(ran, queues.finishing, void)
            audit(memory.pools, [req for req in queues.transferring if req.maybe_allocation])
        except Exception as error:
            log.error(event("books_cleared", effect="the prefix cache is empty"), exc_info=error)
            queues.counters["books_cleared"] += 1
            memory.clear(void, self._handoff.tickets.slots_in_transfer())
            cleared = True
        queues.requeue_all(cleared=cleared)
        self._handoff.start_over(cleared=cleared)


def requeue_unsuspected(queues: Queues) -> None:
    """Return all running requests except the suspects under test to the waiting queue."""
    for req in [*queues.running.reqs, *queues.extending]:
        if req not in queues.suspects.under_test:
            queues.remove(req)
            queues.requeue(req)


def end_requests_of(queues: Queues, outputs: OutputProcessor, adapter_number: int, failure: Failure) -> None:
    """End the requests of an adapter whose tensors are lost."""
    queues.record(AdapterLost(adapter_number))
    for req in list(queues.requests.values()):
        if req.adapter is not None and req.adapter.number == adapter_number:
            outputs.finish(req, FinishReason.ERROR, failure)


def stuck_requests(queues: Queues, *, may_admit: bool) -> list[Ending]:
    """Return the requests to end if no step can be planned, though `may_admit` is set, and no memory is about to be
    freed.

    In this case slots have leaked. A request that no longer fits ends now, not at its time-out, so that it does not
    block other requests."""
    busy = not (may_admit and queues.admits) or queues.flights or queues.pools.deferred.entries or queues.transferring
    if busy or queues.constraints.unready:
        return []
    if queues.num_running:
        return [(queues.running.reqs[0], _memory_lost(queues))]
    if not queues.waiting:
        return []
    quarantine_leaks(queues)
    first = next(reqs[0] for reqs in queues.candidates.values() if reqs)
    return _requests_that_no_longer_fit(queues) or [(first, _memory_lost(queues))]


def quarantine_leaks(queues: Queues) -> int:
    """Quarantine leaked slots, and return their number; call it only while no request holds memory.

    Leaked slots are those that a ledger books for a request, unless another engine may still touch them, and those
    booked for the prefix cache that are in no node."""
    num_lost = 0
    for slots, num_cached in queues.pools.all:
        if np.count_nonzero(slots.owner == CACHE) != num_cached:
            lost = np.setdiff1d(slots.held_by(CACHE), queues.pools.cached_in(slots))
            if len(lost):
                slots.quarantine(lost, CACHE, "leaked")
            num_lost += len(lost)
        lost = np.flatnonzero(slots.owner > 0)
        lost = np.setdiff1d(lost, np.concatenate([NO_IDS, *(ids for _, ids in queues.pools.deferred.in_pool(slots))]))
        for owner in np.unique(slots.owner[lost]).tolist():
            slots.quarantine(lost[slots.owner[lost] == owner], owner, "leaked")
        num_lost += len(lost)
    queues.counters["leaked_pages"] += num_lost
    return num_lost


def _requests_that_no_longer_fit(queues: Queues) -> list[Ending]:
    found: list[Ending] = []
    for req in queues.waiting:
        try:
            check_fits(req, queues.config, queues.pools.usable_pages)
        except ForebayError as error:
            found.append((req, error))
    return found


def _memory_lost(queues: Queues) -> EngineError:
    lost = ", ".join(f"{slots.num_quarantined} of {slots.capacity} {slots.name}" for slots, _ in queues.pools.all)
    return EngineError(
        f"the engine has lost memory (set aside: {lost}), and what is left is too little for this request: restart",
        code="memory_lost",
    )

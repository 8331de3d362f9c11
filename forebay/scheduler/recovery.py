"""Recovery from a failure: requests start over, suspects run alone, and requests that can never finish end."""

from __future__ import annotations

import numpy as np

from forebay.base.errors import EngineError, ForebayError
from forebay.base.log import event, get_logger
from forebay.memory.slots import CACHE, NO_IDS
from forebay.requests.request import Request, Status
from forebay.scheduler.audit import audit
from forebay.scheduler.limits import check_fits
from forebay.scheduler.output_processor import OutputProcessor
from forebay.scheduler.queues import Queues

log = get_logger("scheduler")

Ending = tuple[Request, ForebayError]
"""A request to end, and the error that it ends with."""


def start_over(scheduler: OutputProcessor) -> None:
    """Return every living request to the waiting queue, with its tokens; no step stays in flight.

    KV of completed steps stays in the cache. If the audit finds a wrong ledger, everything is freed instead. Transfers
    continue meanwhile, and slots that they may touch are not free even then."""
    pools, handoff = scheduler.pools, scheduler.handoff
    void, cleared = [flight.plan for flight in scheduler.flights], False
    scheduler.flights.clear()
    ran = [req for req in scheduler.requests.values() if req.held and req.status is not Status.TRANSFERRING]
    try:
        scheduler.memory.start_over(ran, scheduler.finishing, void)
        audit(pools, [req for req in scheduler.transferring if req.held])
    except Exception as error:
        log.error(event("books_cleared", effect="the prefix cache is empty"), exc_info=error)
        scheduler.counters["books_cleared"] += 1
        scheduler.memory.clear(void, handoff.slots_in_transfer())
        cleared = True
    scheduler.all_wait(cleared=cleared)
    handoff.start_over(cleared=cleared)


def set_back_unsuspected(queues: Queues) -> None:
    """Return all running requests except the suspects under test to the waiting queue."""
    for req in [*queues.running.reqs, *queues.extending]:
        if req not in queues.suspects.under_test:
            queues.remove(req)
            queues.set_back(req)


def stuck_requests(queues: Queues) -> list[Ending]:
    """Return the requests to end if no step can be planned and no memory is about to be freed.

    In this case slots have leaked. A request that no longer fits ends now, not at its time-out, so that it does not
    block other requests."""
    busy = queues.flights or queues.pools.deferred.entries or queues.transferring
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

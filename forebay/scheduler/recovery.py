"""After a failure: everybody starts over, those on trial run alone, and who can never be finished ends."""

from __future__ import annotations

import numpy as np

from forebay.base.errors import EngineError, ForebayError
from forebay.base.log import event, get_logger
from forebay.memory.slots import CACHE, NO_IDS
from forebay.requests.request import Request, Status
from forebay.scheduler.audit import audit
from forebay.scheduler.limits import check_fits
from forebay.scheduler.queues import Queues
from forebay.scheduler.telling import Telling

log = get_logger("scheduler")

Ending = tuple[Request, ForebayError]
"""Who ends, and why."""


def start_over(scheduler: Telling) -> None:
    """Nobody runs, nothing is in flight: every living request waits, with the tokens that it has. What completed steps
    computed for it stays in the cache, unless the books turn out to be wrong: then everything is free. Transfers go on
    meanwhile, and what they may touch is not free even then."""
    held, handoff = scheduler.held, scheduler.handoff
    void, cleared = [flight.plan for flight in scheduler.flights], False
    scheduler.flights.clear()
    ran = [req for req in scheduler.requests.values() if req.held and req.status is not Status.TRANSFERRING]
    try:
        held.start_over(ran, scheduler.finishing, void)
        audit(held, [req for req in scheduler.transferring if req.held])
    except Exception as error:
        log.error(event("books_cleared", effect="the prefix cache is empty"), exc_info=error)
        scheduler.counters["books_cleared"] += 1
        held.clear(void, handoff.left())
        cleared = True
    scheduler.everybody_waits(cleared=cleared)
    handoff.start_over(cleared=cleared)


def set_back_who_is_not_on_trial(queues: Queues) -> None:
    """Return all running requests but those on trial to the waiting queue."""
    for req in [*queues.running.reqs, *queues.extending]:
        if req not in queues.suspects.on_trial:
            queues.remove(req)
            queues.set_back(req)


def who_is_stuck(queues: Queues) -> list[Ending]:
    """Nothing could be planned. Where nothing is on its way back either, some memory is lost: who needs more than there
    is left should end now rather than with its time-out, and not hold up the others."""
    busy = queues.flights or queues.held.deferred or queues.transferring
    if busy or queues.constraints.unready:
        return []
    if queues.num_running:
        return [(queues.running.reqs[0], _memory_lost(queues))]
    if not queues.waiting:
        return []
    quarantine_leaks(queues)
    first = next(reqs[0] for reqs in queues.candidates.values() if reqs)
    return _who_no_longer_fits(queues) or [(first, _memory_lost(queues))]


def quarantine_leaks(queues: Queues) -> int:
    """When nobody holds anything: quarantine whatever the ledgers still book for a request, but for what another engine
    may still touch, and what they book for the prefix cache and is in no node of it; how many."""
    num_lost = 0
    for slots, num_cached in queues.held.pools:
        if np.count_nonzero(slots.owner == CACHE) != num_cached:
            lost = np.setdiff1d(slots.held_by(CACHE), queues.held.cached_in(slots))
            if len(lost):
                slots.quarantine(lost, CACHE, "leaked")
            num_lost += len(lost)
        lost = np.flatnonzero(slots.owner > 0)
        lost = np.setdiff1d(lost, np.concatenate([NO_IDS, *(ids for _, ids in queues.held.waiting_in(slots))]))
        for owner in np.unique(slots.owner[lost]).tolist():
            slots.quarantine(lost[slots.owner[lost] == owner], owner, "leaked")
        num_lost += len(lost)
    queues.counters["leaked_pages"] += num_lost
    return num_lost


def _who_no_longer_fits(queues: Queues) -> list[Ending]:
    found: list[Ending] = []
    for req in queues.waiting:
        try:
            check_fits(req, queues.config, queues.held.usable_pages)
        except ForebayError as error:
            found.append((req, error))
    return found


def _memory_lost(queues: Queues) -> EngineError:
    lost = ", ".join(f"{slots.num_quarantined} of {slots.capacity} {slots.name}" for slots, _ in queues.held.pools)
    return EngineError(
        f"the engine has lost memory (set aside: {lost}), and what is left is too little for this request: restart",
        code="memory_lost",
    )

"""Room for the decodes of a step: which requests decode, and which running requests lose their memory (C26, C32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forebay.base.parts import Mask
from forebay.memory.slots import NO_IDS, Ids
from forebay.requests.request import Request, Status
from forebay.scheduler.admission import NewTokenRatio
from forebay.scheduler.displacing import Places
from forebay.scheduler.handoff import Handoff
from forebay.scheduler.queues import Blocked, Queues


class Decodes(NamedTuple):
    """The requests of the running batch that a step can decode, and the pages that it lacks for them.

    `active` has their indices in the batch, None for all. `opens` [number of decodes] marks those whose next token is
    the first of a page. `num_missing` of these pages are not available, none if it is not positive.
    """

    active: Ids | None
    opens: Mask
    num_missing: int

    def postpone(self, reqs: Sequence[Request], *, drafting: bool) -> Ids:
        """Return the indices of the decodes in the batch `reqs` without the youngest ones that open the missing pages;
        with `drafting` also without those whose draft tokens are in flight."""
        indices = np.arange(len(reqs)) if self.active is None else self.active
        postponed = sorted(indices[self.opens].tolist(), key=lambda i: reqs[i].rank)[-self.num_missing :]
        if drafting:
            postponed += [i for i in indices.tolist() if reqs[i].allocation.num_drafts]
        return np.setdiff1d(indices, postponed)


NO_DECODES = Decodes(None, NO_IDS.astype(np.bool_), 0)


def choose_decodes(queues: Queues) -> Decodes:
    """Decide which running requests can decode in the next step, and count the pages that are missing for them.

    A request cannot if a step in flight brings it to its length limit, or if its grammar must first read a token in
    flight.
    """
    batch, constraints = queues.running, queues.constraints
    if not batch.reqs:
        return NO_DECODES
    blocked: Mask | None = batch.tokens_left <= 0 if queues.flights else None
    if constraints.unready or (constraints.living and queues.flights):
        unread = constraints.blocked_rows(batch.reqs, (flight.reqs for flight in queues.flights))
        blocked = unread if blocked is None else blocked | unread
    active, rows = None, batch.req_pool_indices_cpu
    if blocked is not None and blocked.any():
        active = np.flatnonzero(~blocked)
        rows = rows[active]
    opens = queues.pools.opens_page(rows)
    return Decodes(active, opens, int(np.count_nonzero(opens)) - queues.pools.available_pages)


class Preemption:
    """Takes memory from running requests: for decodes that lack pages, and for tenants below their share."""

    def __init__(self, queues: Queues, handoff: Handoff, ratio: NewTokenRatio) -> None:
        self._queues, self._handoff, self._ratio = queues, handoff, ratio

    def make_room(self) -> tuple[Ids | None, bool]:
        """Free pages until the next step has those that its decodes open. Return the indices of the decodes in the
        running batch, None for all, and whether the step has room for new requests.

        Unused pages of draft tokens are freed first. Then the last request in rank is retracted, and no request is
        admitted. If enough pages are about to be freed, the youngest decodes that lack one wait for these instead.
        """
        queues, roomy = self._queues, True
        while (decodes := choose_decodes(queues)).num_missing > 0:
            if queues.memory.allocator.free_unused(queues.running.req_pool_indices_cpu):
                continue
            if self._can_wait(decodes.num_missing):
                return decodes.postpone(queues.running.reqs, drafting=not roomy), roomy
            roomy, victim = False, queues.victim
            if victim.allocation.num_drafts:  # what it holds is known only when its steps have committed
                return decodes.postpone(queues.running.reqs, drafting=True), roomy
            self.retract(victim)
        return decodes.active, roomy

    def _can_wait(self, num_pages: int) -> bool:
        """Return whether `num_pages` pages are about to be freed, or only one request runs, which keeps its memory."""
        queues = self._queues
        finishing = sum(req.allocation.num_pages for req in queues.finishing)
        alone = queues.num_running == 1 and not self._handoff.has_arrivals
        return num_pages <= queues.pools.deferred.num_pages + finishing or alone

    def displace(self, blocked: Blocked) -> None:
        """If a tenant has waited long enough for places within its share, take them from a tenant above its own share.

        No other request is admitted before the tenant has them. While memory is about to be freed, none is taken.
        """
        req, queues = blocked.req, self._queues
        if req.status is not Status.WAITING or req.account.is_patient(queues.pools.steps.launched, queues.now):
            return
        victim = Places(queues, self._ratio.value).victim(blocked)
        if victim is None:
            return
        queues.claimant = req.account
        if not (blocked.returning or victim.allocation.num_drafts):
            queues.counters["displaced"] += 1
            self.suspend(victim)

    def retract(self, req: Request) -> None:
        """Release a running request's memory, because others need it, and return it to the waiting queue."""
        req.num_retractions += 1
        self.suspend(req)
        self._queues.counters["retractions"] += 1
        reqs = self._queues.running.reqs
        num_decoded, num_max_new = sum(r.num_output for r in reqs), sum(r.params.max_tokens for r in reqs)
        self._ratio.after_retraction(num_decoded, num_max_new, len(reqs))

    def suspend(self, req: Request) -> None:
        """Return a running request to the waiting queue. Its memory is copied to the host if that costs less than
        computing it again; the prefix cache keeps its pages until they are evicted."""
        queues = self._queues
        queues.remove(req)
        if not (req.wants_prompt_logprobs or req.pools_all) and queues.memory.allocator.offload(req.allocation):
            queues.counters["retractions_kept"] += 1
        queues.requeue(req)

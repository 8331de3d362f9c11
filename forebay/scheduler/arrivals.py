"""Requests whose prompts were computed elsewhere and have arrived, until they have decoded here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from forebay.memory.req_to_token_pool import DecodeReqToTokenPool
from forebay.memory.slots import Ids
from forebay.requests.request import Request, Status, blamed_on
from forebay.requests.schedule_batch import ScheduleBatch
from forebay.scheduler.queues import Line, Queues

HANDOVERS_PER_PLAN: Final = 8
"""Requests that one plan offers places for, and as many that begin to decode: 50 to 100 us each. More follow in the
next plans, so that a burst of requests delays no step by more than 2 ms."""


class Arrivals:
    """A queue of requests with all of their KV, which run as soon as fewer than `max_running_requests` do."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.line = Line()  # transferred, and not running yet
        self.fresh: set[Request] = set()  # may have decoded nothing here yet

    def forget(self, req: Request) -> None:
        """Remove a request that has ended."""
        self.fresh.discard(req)
        if req in self.line:
            self.line.remove(req)

    def start_over(self) -> None:
        """Remove the requests that compute their prompts here now."""
        self.fresh.clear()
        for req in [req for req in self.line if req.status is not Status.TRANSFERRING]:
            self.line.remove(req)

    def join(self) -> None:
        """Start the first requests in the line, as many as may run."""
        queues = self.queues
        room = queues.config.max_running_requests - queues.num_running
        joining: list[Request] = []
        while self.line.of and len(joining) < min(room, HANDOVERS_PER_PLAN):
            joining.append(self.line.first)
            self.line.remove(joining[-1])
        if not joining:
            return
        rows = cast(DecodeReqToTokenPool, queues.pools.rows)
        rows.alloc_running([req.allocation for req in joining], queues.num_running)
        for req in joining:
            with blamed_on(req):
                queues.memory.allocator.join(req)
            queues.remove(req)
            req.move(Status.DECODING)
        batch = ScheduleBatch(queues.pools.table)
        batch.prepare_for_prebuilt(joining)
        queues.running.merge_batch(batch)
        self.fresh.update(joining)

    def most_drafts(self, reqs: Sequence[Request], most: Ids) -> Ids:
        """Return 0 drafts for a request's first step: the device has those of the row's last tenant, if any."""
        self.fresh = {
            req for req in self.fresh if req.maybe_allocation and req.allocation.kv_bound <= req.num_prompt + 1
        }
        return np.where([req in self.fresh for req in reqs], 0, most) if self.fresh else most

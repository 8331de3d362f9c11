"""Places outside of requests, which a check of transfers uses between two engines."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import Unavailable
from forebay.memory.holding import footprint
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import MISSES
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.transfers import Span, Ticket
from forebay.scheduler.journal import SetAside
from forebay.scheduler.queues import Queues
from forebay.scheduler.tickets import OpenTicket, Tickets

_ASIDE: Final = 1 << 62  # no request's id


class SparePlaces:
    """Places that are free now, reserved behind a ticket."""

    def __init__(self, queues: Queues, tickets: Tickets) -> None:
        self.queues, self._tickets = queues, tickets

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens of the longest request that would fit now."""
        pools, config = self.queues.pools, self.queues.config
        return min(pools.available_pages * config.page_size, config.context_length)

    def set_aside(self, ticket: Ticket, num_tokens: int) -> dict[str, Span]:
        """Reserve places for all that layers keep of `num_tokens` tokens, until the ticket is closed. Raises
        Unavailable if there are none."""
        memory, pools = self.queues.memory, self.queues.pools
        if self.queues.journal is not None:
            self.queues.journal(SetAside(ticket, num_tokens))
        if pools.scarce or not pools.rows.available_size() or not 0 < num_tokens <= self.most_tokens:
            raise Unavailable(
                f"there is no room for {num_tokens} tokens beside the running requests, at most {self.most_tokens}",
                code="no_room",
            )
        req = Request(_ASIDE, [0] * num_tokens, SamplingParams(max_tokens=1))
        match, pin = memory.prefixes.pin(req, MISSES[MissReason.DISABLED])
        memory.allocator.pre_allocate(req, match, pin, footprint(num_tokens, pools.page_size))
        spans = pools.places(req.allocation, 0, 0)
        aside = OpenTicket(ticket, None, settled=True, named=[spans], whole=True)
        self._tickets.begin(aside)
        req.allocation.ticket = aside
        memory.allocator.release(req)
        return spans

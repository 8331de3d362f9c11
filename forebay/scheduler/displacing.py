"""Which request gives its place to another tenant's (C32, decision 50).

A tenant's share of the rows and of the pages is that of its weight among the tenants that have requests. A tenant that
stays within its share takes places from one that is above its own. So no tenant falls below its share by this, and the
tenant that gains does not exceed its own: no displacement can be answered by another.
"""

from __future__ import annotations

from forebay.memory.holding import footprint
from forebay.requests.account import Account
from forebay.requests.request import Request, Status
from forebay.scheduler.admission import growth
from forebay.scheduler.queues import Blocked, Queues, by_rank


class Places:
    """The rows and pages of each tenant's running requests; those count with what they are expected to grow by, as at
    their admission."""

    def __init__(self, queues: Queues, ratio: float) -> None:
        self._queues, self._ratio = queues, ratio
        self._rows: dict[Account, int] = {}
        self._pages: dict[Account, int] = {}
        self._page_size = queues.config.page_size
        self._ranked = sorted([*queues.running.reqs, *queues.extending], key=by_rank)
        for req in self._ranked:
            self._rows[req.account] = self._rows.get(req.account, 0) + 1
            pages = req.allocation.num_pages + growth(req, ratio, self._page_size)
            self._pages[req.account] = self._pages.get(req.account, 0) + pages

    def victim(self, blocked: Blocked) -> Request | None:
        """The request that `blocked` displaces, of the tenant that is furthest above its share of what is missing: the
        last in rank, but of equal priority one that decodes. None if no tenant is above its share, or the one that
        gains would be; never the first in rank of any.

        A request whose prompt is under way keeps its place until it decodes. Else tenants that displace each other's
        newest requests would compute the same prompts, and encode the same images, again and again.
        """
        req, room = blocked.req, self._queues.room
        num_rows, num_pages = self._queues.pools.rows.size, self._queues.config.num_pages
        need = footprint(len(req.tokens), self._page_size) + growth(req, self._ratio, self._page_size)
        rows, pages = self._rows.get(req.account, 0) + 1, self._pages.get(req.account, 0) + need
        if rows > room.share(req.tenant, num_rows) or pages > room.share(req.tenant, num_pages):
            return None
        held, total = (self._rows, num_rows) if blocked.lacks_row else (self._pages, num_pages)
        above = {
            account: number / room.share(account.name, total)
            for account, number in held.items()
            if number > room.share(account.name, total) and self._rows[account] > 1
        }
        if not above:
            return None
        return self._last(max(above, key=lambda account: above[account]))

    def _last(self, account: Account) -> Request:
        """Return the request to displace of those of one tenant."""
        _, *own = (req for req in self._ranked if req.account is account)
        last = [req for req in reversed(own) if req.rank[0] == own[-1].rank[0]]
        return next((req for req in last if req.status is Status.DECODING), last[0])

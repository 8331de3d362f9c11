"""Places that tenants share by their weights (C32)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from forebay.base.errors import Overloaded


class Room:
    """Places for requests, or bytes, that tenants share by their weights: a tenant may take any that are free. If all
    are taken, a tenant still gets in as long as it has fewer than its share: no tenant's queue keeps others out (C32).

    With T tenants of one weight at most `limit * (1 + 1/2 + ... + 1/T)` requests are inside.
    """

    def __init__(self, weights: Mapping[str, int], inside: Iterable[str] = ()) -> None:
        """`inside` are the tenants of the requests that are inside already."""
        self._weights = weights
        self._num_of = Counter(inside)  # no entry is 0

    @property
    def num_inside(self) -> int:
        return self._num_of.total()

    def num_of(self, tenant: str) -> int:
        """Return how many of a tenant are inside."""
        return self._num_of[tenant]

    def enter(self, tenant: str, count: int = 1) -> None:
        """Count requests of a tenant that were admitted."""
        self._num_of[tenant] += count

    def leave(self, tenant: str, count: int = 1) -> int:
        """Count requests of a tenant that ended. Return how many are still inside."""
        self._num_of[tenant] -= count
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        return self._num_of.total()

    def share(self, tenant: str, limit: int) -> int:
        """Return the tenant's share of `limit` while others are here: all of it if there are none."""
        here = {tenant, *self._num_of}
        return min(limit, max(1, limit * self._weight(tenant) // sum(map(self._weight, here))))

    def has_room(self, tenant: str, limit: int, count: int = 1) -> bool:
        """Whether there is room for `count` requests more."""
        own = self._num_of[tenant]
        return self._num_of.total() + count <= limit or own + count <= self.share(tenant, limit)

    def check(self, tenant: str, limit: int, count: int = 1) -> None:
        """Raise Overloaded if there is no room for `count` requests more."""
        if self.has_room(tenant, limit, count):
            return
        own, inside = self._num_of[tenant], self.num_inside
        # No count of other tenants' requests is told (C29).
        whose = "" if own == inside else " of this API key"
        raise Overloaded(
            f"{own} requests{whose} run or wait; at most {limit} are taken (--max-running-requests and "
            "--max-queued-requests): try again later"
        )

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)

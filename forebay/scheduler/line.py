"""Requests that wait for the same places, several tenants side by side."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Final

from forebay.requests.account import Account
from forebay.requests.request import Request

by_rank: Final = attrgetter("rank")


class Line:
    """A waiting line. `of` has each tenant's requests in the order of their rank, and no tenant without any. Nothing in
    here depends on how many requests wait, but what looks at all of them."""

    def __init__(self) -> None:
        self.of: dict[Account, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.of.values())

    def __contains__(self, req: Request) -> bool:
        return req in self.of.get(req.account, ())

    def add(self, req: Request) -> None:
        """Insert a request into its account's part of the queue, by rank."""
        insort(self.of.setdefault(req.account, []), req, key=by_rank)

    def remove(self, req: Request) -> None:
        """Remove a request; it must be in the queue."""
        own = self.of[req.account]
        own.remove(req)
        if not own:
            del self.of[req.account]

    @property
    def first(self) -> Request:
        """The first in rank of the tenant that has been served least."""
        return self.of[min(self.of, key=lambda account: account.service)][0]

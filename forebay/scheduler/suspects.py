"""Search for the request that makes a step fail, by running its requests again in ever smaller groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from forebay.requests.request import Request, Status

Suspected = Sequence[tuple[Request, int]]
"""Requests in the order of the failed step, each with the KV length at which it has got past that step."""


class Suspects:
    """Bisection over the requests of a failed step: groups run one after the other, and no other request runs.

    A group whose requests all got past the failed step is cleared. A group that fails is split in two, so that only a
    request that fails alone is the culprit. Finding one takes log2 of the group's size in steps; the other requests
    lose only time.
    """

    def __init__(self) -> None:
        self.groups: deque[dict[Request, int]] = deque()

    @property
    def under_test(self) -> Collection[Request]:
        """Return the requests of the current group; empty if there are no suspects."""
        return self.groups[0] if self.groups else ()

    def add_group(self, suspected: Suspected) -> None:
        """Add the requests of a failed step, in two groups that are tested first."""
        for req, _ in suspected:
            self.clear(req)
        half = -(-len(suspected) // 2)
        for part in (suspected[half:], suspected[:half]):
            if part:
                self.groups.appendleft(dict(part))

    def clear(self, req: Request) -> None:
        """Remove a request that has ended or passed; no-op if it is no suspect."""
        for group in self.groups:
            group.pop(req, None)
        self.groups = deque(group for group in self.groups if group)

    def clear_passed(self) -> None:
        """Remove the suspects whose suspected tokens were computed without a failure."""
        running = (Status.EXTENDING, Status.DECODING)
        passed = [
            req for req, mark in self.groups[0].items() if req.status in running and req.allocation.kv_committed >= mark
        ]
        for req in passed:
            self.clear(req)

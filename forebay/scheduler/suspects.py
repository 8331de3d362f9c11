"""Search for the request that makes a step fail, by running its requests again in ever smaller groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from forebay.requests.request import Request, Status

Accused = Sequence[tuple[Request, int]]
"""Requests in the order of the step that failed, each with the KV length at which it has got past that step."""


class Suspects:
    """Groups of requests on trial, one group after the other; while there are any, nobody else runs.

    A group whose members all got past the step that failed is innocent. One that fails is cut in halves, so that only a
    request that fails alone is guilty. Each guilty request takes log2 of the group's size in steps; the others lose
    nothing but time.
    """

    def __init__(self) -> None:
        self.groups: deque[dict[Request, int]] = deque()

    @property
    def on_trial(self) -> Collection[Request]:
        return self.groups[0] if self.groups else ()

    def accuse(self, accused: Accused) -> None:
        """Record requests that were together in a step that failed."""
        for req, _ in accused:
            self.acquit(req)
        half = -(-len(accused) // 2)
        for part in (accused[half:], accused[:half]):
            if part:
                self.groups.appendleft(dict(part))

    def acquit(self, req: Request) -> None:
        """The request has ended, or is innocent; nothing where it was no suspect."""
        for group in self.groups:
            group.pop(req, None)
        self.groups = deque(group for group in self.groups if group)

    def acquit_who_passed(self) -> None:
        """Clear the suspects whose suspected tokens were computed without a failure."""
        running = (Status.EXTENDING, Status.DECODING)
        passed = [
            req for req, mark in self.groups[0].items() if req.status in running and req.residency.kv_committed >= mark
        ]
        for req in passed:
            self.acquit(req)

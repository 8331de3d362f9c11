"""In which order requests start, and who gives way when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from forebay.config.engine_config import SchedulePolicy
from forebay.requests.request import Request

MAX_OVERTAKES: Final = 64  # a request that does not fit lets so many others go first, then everybody waits for it
_MAX_LPM_QUEUE: Final = 128  # beyond this many, matching each waiting request costs more than it gains

Rank = tuple[int, int]


def rank(req: Request, policy: SchedulePolicy) -> Rank:
    """A request's place in a total order that never changes: the smaller, the more it is served.

    Because the order is fixed, preemption cannot cycle: the first in it is never a victim, so it finishes.
    """
    return (-req.priority if policy is SchedulePolicy.PRIORITY else 0, req.order)


def queue_order(
    waiting: Sequence[Request], policy: SchedulePolicy, cached_tokens: Callable[[Request], int]
) -> Sequence[Request]:
    """The waiting requests (already in the order of their rank) as this pass should try them: first those that have
    been overtaken often enough, in that order whatever their hits."""
    if policy is not SchedulePolicy.LPM or not 1 < len(waiting) <= _MAX_LPM_QUEUE:
        return waiting
    return sorted(waiting, key=lambda req: (1, -cached_tokens(req)) if req.overtaken < MAX_OVERTAKES else (0, 0))


def victim(running: Iterable[Request], policy: SchedulePolicy) -> Request:
    """Who gives way: the last in rank, be it the one that needs the memory."""
    return max(running, key=lambda req: rank(req, policy))

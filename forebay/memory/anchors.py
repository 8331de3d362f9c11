"""The anchors of a prompt: the positions at which its recurrent state is kept.

KV can be resumed at every page; a state only at a position at which it was kept, and each costs the same. So states are
kept at positions at which prompts tend to part and to be continued, and at an interval only as a floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

MAX_PER_PROMPT: Final = 8  # states that one pass over a prompt keeps at most
MIN_DISTANCE: Final = 32  # tokens: what is closer to a better anchor is not worth a slot of its own


class Reason(IntEnum):
    """Priority: the higher value wins a slot."""

    INTERVAL = 0
    RESUME = 1  # the end of a message or role, or where the client set a breakpoint
    END = 2  # the end of the prompt: this prompt again, and what follows it
    BRANCH = 3  # a cached or waiting prompt parts from this one here: the only one that is no guess


class Anchor(NamedTuple):
    """A length at which to keep the prompt's state, and the reason."""

    length: int  # tokens
    reason: Reason


def plan_anchors(
    *,
    start: int,
    num_prompt: int,
    page_size: int,
    resume_points: Iterable[int],
    branches: Iterable[int],
    interval: int,
    budget: int = MAX_PER_PROMPT,
) -> list[Anchor]:
    """Return the positions at which to keep the state while the tokens [start, num_prompt) are computed, ascending.

    All are whole pages behind `start` and before the prompt's last token, which is always computed. If two are
    closer than MIN_DISTANCE, the one with the better reason stays, of equals the later; so, too, if they are more
    than `budget`. `interval` tokens are between those without a reason.
    """
    end = (num_prompt - 1) // page_size * page_size
    wanted = [
        *(Anchor(length, Reason.INTERVAL) for length in range(start + interval, end, interval)),
        *(Anchor(length, Reason.RESUME) for length in resume_points),
        *(Anchor(length, Reason.BRANCH) for length in branches),
        Anchor(end, Reason.END),
    ]
    kept: list[Anchor] = []
    for length, reason in sorted(wanted, key=lambda point: (point.reason, point.length), reverse=True):
        floor = length // page_size * page_size
        if len(kept) < budget and start < floor <= end and _apart(floor, reason, kept):
            kept.append(Anchor(floor, reason))
    return sorted(kept)


def _apart(length: int, reason: Reason, kept: Sequence[Anchor]) -> bool:
    """Places at which prompts really part are all worth it, however close, and so is the end."""
    distance = 1 if reason >= Reason.END else MIN_DISTANCE
    return all(abs(length - other.length) >= distance for other in kept)

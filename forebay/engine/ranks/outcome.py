"""The outcome of one log entry on one rank, and the interface to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from forebay.base.errors import EngineError


class Outcome(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """`failed` has the indices of a step's sequences for which a value was not finite on this rank. `error` is the
    error of an entry that failed, "" for none. `more`: after a capture, whether this rank has more to capture."""

    failed: tuple[int, ...] = ()
    error: str = ""
    more: bool = False


DONE = Outcome()


class RankLost(EngineError):
    """A rank that ended, stalled, or is in another state than the others. The engine cannot continue without it."""

    default_code = "rank_lost"


class Ranks(Protocol):
    """The other ranks, as rank 0 sees them."""

    def send(self, record: bytes, *, limited: bool = True) -> None:
        """Append the next record of the log for every rank; waits while the slowest rank leaves no room. Without
        `limited` the entry may take longer than a step."""

    def outcomes(self, number: int) -> Sequence[Outcome]:
        """Wait for the outcomes of an entry, one per rank, and return them. Those of earlier entries are dropped."""
        ...

    def lost(self, error: EngineError) -> NoReturn:
        """End all ranks, because they cannot continue together."""

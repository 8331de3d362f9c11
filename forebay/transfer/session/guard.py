"""One place in which an exception, raised while a peer is handled, ends the session with that peer and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from forebay.base.errors import WireError
from forebay.base.log import event, get_logger
from forebay.requests.updates import Failure
from forebay.transfer.session.connection import ConnectionLost
from forebay.transfer.wire import frames

NETWORK_ERRORS: Final = (ConnectionLost, OSError)

log = get_logger("transfer")


class Guard:
    """Runs work that one peer caused (C33). `num_rejected` counts the sessions that ended because of a peer's message
    and not because of the network."""

    def __init__(self) -> None:
        self.num_rejected = 0

    def run(self, where: str, work: Callable[[], object], lose: Callable[[Failure], None]) -> None:
        """Run `work` for the peer at `where`. If it raises, call `lose` with the reason; `lose` ends the session."""
        try:
            work()
        except Exception as error:
            lose(self.reason(where, error))

    def reason(self, where: str, error: Exception) -> Failure:
        """Return the failure with which the session at `where` ends, and count and log it."""
        if not isinstance(error, NETWORK_ERRORS):
            self.num_rejected += 1
        if isinstance(error, (WireError, *NETWORK_ERRORS)):
            return frames.peer_lost(where, str(error))
        log.error(event("peer_failed", where=where, why=repr(error)), exc_info=error)
        return frames.peer_rejected(where, error)

"""The limit of connections, and the choice of the one to close when it is reached."""

from __future__ import annotations

from typing import Final, Protocol

SPARE: Final = 32  # connections above the cap, for /health


class Guest(Protocol):
    """A connection. `over_cap` is set by `ConnectionRoom.enter`."""

    over_cap: bool

    def give_way(self) -> None:
        """Close: another one needs the place."""


class ConnectionRoom:
    """At most `limit` connections. Where all places are taken, a new one gets that of the connection that has waited
    longest without having said a whole request. Where every connection has a request under way, `SPARE` more are let in
    `over_cap`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Guest] = set()
        self._waiting: dict[Guest, None] = {}  # for a whole request; the first has waited longest

    def enter(self, guest: Guest) -> bool:
        """False where there is no place at all."""
        if len(self._open) >= self._limit:
            self._make_room()
        if len(self._open) >= self._limit + SPARE:
            return False
        guest.over_cap = len(self._open) >= self._limit
        self._open.add(guest)
        self._waiting[guest] = None
        return True

    def wait(self, guest: Guest) -> None:
        """Mark a connection as waiting for its next request."""
        if guest in self._open:
            self._waiting.pop(guest, None)
            self._waiting[guest] = None

    def work(self, guest: Guest) -> None:
        """Mark a connection as working: its request is complete, and it waits for the answer."""
        self._waiting.pop(guest, None)

    def leave(self, guest: Guest) -> None:
        self._open.discard(guest)
        self._waiting.pop(guest, None)

    def _make_room(self) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is None or (oldest.over_cap and len(self._open) < self._limit + SPARE):
            return  # those above the cap came last: before they go, all the spare places must be taken
        self.leave(oldest)
        oldest.give_way()

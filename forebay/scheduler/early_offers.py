"""Offers of decode instances that arrived before the requests that they are for."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.requests.request import Request
from forebay.requests.transfers import Offered, Rendezvous, Ticket, digest_of

Half = tuple[int, int, bytes]
"""What a request and its offer have in common: the number of a room, a prompt's length and its digest."""


def half_of(offered: Offered) -> Half:
    """Return the key by which an offer and its request find each other: room, prompt length and digest."""
    return offered.ticket.room, offered.num_tokens, offered.digest


def half_wanted(req: Request) -> Half:
    """Return the half that an offer for this request has."""
    return room_of(req).room, req.num_prompt, digest_of(req.tokens)


def room_of(req: Request) -> Rendezvous:
    """Return where the request meets its other half; it must have a rendezvous."""
    assert req.rendezvous is not None, f"{req} has no room"
    return req.rendezvous


class EarlyOffers:
    """By ticket, the oldest first, and by half. Each stays until its deadline; deadlines never decrease."""

    def __init__(self) -> None:
        self._by_ticket: dict[Ticket, tuple[Offered, float]] = {}
        self._by_half: dict[Half, dict[Ticket, None]] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Offered]:
        return (offered for offered, _ in self._by_ticket.values())

    def add(self, offered: Offered, deadline: float) -> None:
        """Store an offer until `deadline`; it replaces an offer with the same ticket."""
        self.discard(offered.ticket)
        self._by_ticket[offered.ticket] = offered, deadline
        self._by_half.setdefault(half_of(offered), {})[offered.ticket] = None

    def take(self, half: Half) -> Offered | None:
        """Remove and return the oldest offer of this half; None if there is none."""
        tickets = self._by_half.get(half)
        return self.discard(next(iter(tickets))) if tickets else None

    def discard(self, ticket: Ticket) -> Offered | None:
        """Remove and return the offer of this ticket; None if there is none."""
        found = self._by_ticket.pop(ticket, None)
        if found is None:
            return None
        offered, half = found[0], half_of(found[0])
        tickets = self._by_half[half]
        del tickets[ticket]
        if not tickets:
            del self._by_half[half]
        return offered

    def take_oldest(self) -> Offered | None:
        """Remove and return the oldest offer; None if there is none."""
        return self.discard(next(iter(self._by_ticket))) if self._by_ticket else None

    def take_overdue(self, now: float) -> Iterator[Offered]:
        """Remove and return one offer after another whose deadline has passed."""
        while self._by_ticket:
            ticket, (_, deadline) = next(iter(self._by_ticket.items()))
            if now <= deadline:
                return
            if offered := self.discard(ticket):
                yield offered

    def clear(self) -> None:
        """Drop all offers."""
        self._by_ticket.clear()
        self._by_half.clear()

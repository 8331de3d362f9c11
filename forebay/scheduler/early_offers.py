"""Offers of decode instances that arrived before their requests."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.requests.request import Request
from forebay.requests.transfers import NO_ADAPTER, AdapterIdentity, Offered, Rendezvous, Ticket

MatchKey = tuple[int, int, bytes]
"""Room number, prompt length and prompt digest: equal for a request and its offer."""


def key_of_offer(offered: Offered) -> MatchKey:
    """Return the key of an offer; its request has the same."""
    return offered.ticket.room, offered.num_tokens, offered.digest


def key_of_request(req: Request) -> MatchKey:
    """Return the key of a request; its offer has the same."""
    return room_of(req).room, req.num_prompt, req.prompt_digest


def room_of(req: Request) -> Rendezvous:
    """Return the rendezvous of a request; it must have one."""
    assert req.rendezvous is not None, f"{req} has no room"
    return req.rendezvous


def adapter_of(req: Request) -> AdapterIdentity:
    """Return the identity of a request's adapter; its offer has the same."""
    return AdapterIdentity(req.adapter.name, req.adapter.digest) if req.adapter else NO_ADAPTER


def pictures_of(req: Request) -> tuple[bytes, ...]:
    """Return the digests of a request's pictures, in the order of the prompt; its offer has the same."""
    return tuple(encoding.digest for encoding in req.pictures.encodings) if req.pictures else ()


class EarlyOffers:
    """Offers by ticket, the oldest first, and by key. Each stays until its deadline; deadlines never decrease."""

    def __init__(self) -> None:
        self._by_ticket: dict[Ticket, tuple[Offered, float]] = {}
        self._by_key: dict[MatchKey, dict[Ticket, None]] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Offered]:
        return (offered for offered, _ in self._by_ticket.values())

    def add(self, offered: Offered, deadline: float) -> None:
        """Store an offer until `deadline`; it replaces an offer with the same ticket."""
        self.discard(offered.ticket)
        self._by_ticket[offered.ticket] = offered, deadline
        self._by_key.setdefault(key_of_offer(offered), {})[offered.ticket] = None

    def take(self, key: MatchKey) -> Offered | None:
        """Remove and return the oldest offer with this key; None if there is none."""
        tickets = self._by_key.get(key)
        return self.discard(next(iter(tickets))) if tickets else None

    def discard(self, ticket: Ticket) -> Offered | None:
        """Remove and return the offer of this ticket; None if there is none."""
        found = self._by_ticket.pop(ticket, None)
        if found is None:
            return None
        offered, key = found[0], key_of_offer(found[0])
        tickets = self._by_key[key]
        del tickets[ticket]
        if not tickets:
            del self._by_key[key]
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
        self._by_key.clear()

"""Tickets of transfers that are not closed, and the orders for the component that executes transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.memory.slots import Ids
from forebay.requests.request import Request
from forebay.requests.transfers import Order, Send, Span, Ticket, Withdraw
from forebay.requests.updates import Failure
from forebay.scheduler.memory.deferred import TransferSlots


@dataclass(slots=True, eq=False)
class OpenTicket:
    """A ticket of `req` (None: no request waits for it any more), to be settled by `deadline`. `named` are the places
    in orders so far: until it `is_open`, as a fence is, they may be read or written. It is `whole` once these are
    more than pages of KV."""

    ticket: Ticket
    req: Request | None
    deadline: float = np.inf
    settled: bool = False  # it has come to its end, well or not
    named: list[Mapping[str, Span]] = field(default_factory=list)
    whole: bool = False
    is_open: bool = False

    @property
    def ended(self) -> bool:
        return self.req is None


@dataclass(frozen=True, slots=True)
class _All:
    """Open when all these tickets are closed."""

    tickets: Sequence[OpenTicket]

    @property
    def is_open(self) -> bool:
        return all(ticket.is_open for ticket in self.tickets)

    @property
    def whole(self) -> bool:
        return True

    @property
    def ended(self) -> bool:
        return all(ticket.ended for ticket in self.tickets)


class Tickets:
    """The tickets of one engine that are open, and its orders that were not taken yet."""

    def __init__(self) -> None:
        self.open: dict[Ticket, OpenTicket] = {}
        self.orders: list[Order] = []

    def begin(self, open_ticket: OpenTicket) -> None:
        """Add a ticket, which stays open until it is closed."""
        self.open[open_ticket.ticket] = open_ticket

    def close(self, open_ticket: OpenTicket) -> None:
        """Remove a ticket: no other engine accesses the places that it named any more."""
        del self.open[open_ticket.ticket]
        open_ticket.is_open = True

    def send(self, order: Send) -> None:
        """Order that the places named in `order` are sent, which its ticket then covers."""
        self.open[order.ticket].named.append(order.spans)
        self.orders.append(order)

    def withdraw(self, ticket: Ticket, failure: Failure) -> None:
        """Order that the other engine learns why a ticket ends."""
        self.orders.append(Withdraw(ticket, failure))

    def take_orders(self) -> list[Order]:
        """Return the orders for the component that executes transfers, once and in order."""
        orders, self.orders = self.orders, []
        return orders

    @property
    def has_orders(self) -> bool:
        """Whether there are orders to take. The plan that wrote them may have stopped before it had written all."""
        return bool(self.orders)

    @property
    def num_open(self) -> int:
        """Return the number of tickets that are not closed."""
        return len(self.open)

    def slots_in_transfer(self) -> TransferSlots | None:
        """Return the slots that other engines may access, from the orders alone; None for none."""
        ids: dict[str, list[Ids]] = {}
        tickets = [ticket for ticket in self.open.values() if ticket.named]
        for kind, span in (item for ticket in tickets for named in ticket.named for item in named.items()):
            ids.setdefault(kind, []).append(span.ids)
        if not tickets:
            return None
        first = tickets[0].req
        return TransferSlots(
            ticket=_All(tickets),
            request_id=first.id if first else 1,
            ids={kind: np.unique(np.concatenate(parts)) for kind, parts in ids.items()},
        )

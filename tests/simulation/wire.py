"""What carries transfers between two simulated engines: it loses, delays, doubles, reorders and alters what is sent.

It keeps the promises of `forebay.requests.transfers`: what does not arrive whole is broken, each ticket's news come in
order, and nobody touches a place behind `Closed`. What is sent is read as late as that allows, and written later still,
ended requests or not: a page that is handed out too early has somebody else's words in it by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from forebay.base.errors import EngineError
from forebay.memory.slots import CACHE
from forebay.requests.transfers import (
    Arrived,
    Broken,
    Closed,
    Decline,
    Event,
    Offer,
    Offered,
    Order,
    Renewed,
    Rest,
    Send,
    Sent,
    Span,
    Tail,
    Ticket,
    Withdraw,
)
from forebay.requests.updates import Failure
from forebay.scheduler.handoff import ASLEEP
from tests.simulation.device_memory import POISON
from tests.simulation.hashing import I64
from tests.simulation.liveness import require

if TYPE_CHECKING:
    from tests.simulation.pair import Half


@dataclass(frozen=True, kw_only=True)
class WireFaults:
    """Chances for each message or, of `death`, for each tick."""

    lost: float = 0.0
    altered: float = 0.0
    doubled: float = 0.0
    death: float = 0.0
    late: float = 0.3  # that nothing of a ticket moves in a tick


@dataclass(slots=True)
class Places:
    """Slots that an order named, whose they were and in which hand-out."""

    half: Half
    spans: dict[str, Span]
    request_id: int
    generations: dict[str, I64] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, span in self.spans.items():
            self.generations[kind] = self.half.slots(kind).generation[span.ids].copy()

    def check(self, what: str, *, cached: bool) -> None:
        """They are still held, by the request or, what is only read, by the cache."""
        for kind, span in self.spans.items():
            slots = self.half.slots(kind)
            owner, same = slots.owner[span.ids], slots.generation[span.ids] == self.generations[kind]
            # Damaged ledgers were cleared: all that transfers may touch is booked for one of their requests.
            of_another = (owner > 0) & ((self.half.oracles.num_damaged > 0) | (kind in OF_ROWS))
            held = (owner == self.request_id) | ((owner == CACHE) & cached) | of_another
            require(
                bool((held & same).all()), f"{what} {kind} {span.ids} of request {self.request_id}, held by {owner}"
            )


BY_SLOT: Final = ("state", "ring")  # kinds without pages
OF_ROWS: Final = ("ring",)  # whose slots are rows, which are booked for nobody in particular

Words = dict[str, tuple[I64, list[np.ndarray]]]
"""By kind: positions (of `BY_SLOT` nothing) and what stands there."""


@dataclass(slots=True)
class Link:
    """One ticket on its way."""

    ticket: Ticket
    offer: Offer
    to: Places
    to_prefill: deque[Event] = field(default_factory=deque)
    to_decode: deque[Event] = field(default_factory=deque)
    unread: deque[tuple[Places, Tail | None]] = field(default_factory=deque)
    unwritten: deque[tuple[Words, Tail | None]] = field(default_factory=deque)
    known: bool = False  # to prefill
    alive: bool = True
    damaged: bool = False


class Wire:
    """Between `prefill` and `decode`. `hurt` is told of each room of which something goes wrong."""

    def __init__(self, rng: Random, prefill: Half, decode: Half, hurt: Callable[[int], None]) -> None:
        self.rng, self.prefill, self.decode, self.hurt = rng, prefill, decode, hurt
        self.faults = WireFaults()
        self.links: dict[Ticket, Link] = {}
        self.num_arrived = self.num_late = 0
        self.rests = False  # prefill says so
        self.declined: deque[Offered] = deque()  # on their way to prefill
        self.altered: set[Ticket] = set()  # tickets of tails that were altered

    # -- orders ----------------------------------------------------------------------------------------------------

    def submit(self, half: Half, order: Order) -> None:
        if isinstance(order, Offer):
            self._offer(order)
            return
        if isinstance(order, Decline):
            self.hurt(order.ticket.room)
            self._decline(order, order.failure)
            return
        if isinstance(order, Rest):
            self.rests = order.asleep
            return
        link = self.links.get(order.ticket)
        if link is None:
            return  # closed on the other side's word
        if isinstance(order, Send):
            require(half is self.prefill, "decode sends nothing")
            self._send(link, order)
        else:
            self._withdraw(half, link, order)

    def _offer(self, offer: Offer) -> None:
        require(offer.ticket not in self.links, f"{offer.ticket} was offered twice")
        request_id = self.decode.of_room(offer.ticket.room)
        link = self.links[offer.ticket] = Link(offer.ticket, offer, Places(self.decode, offer.spans, request_id))
        if self._chance(self.faults.lost):
            self._damage(link)
            return
        if self.rests and self._chance(0.5):  # decode knows it already
            self.damage_all(link, "prefill is asleep")
            self._decline(offer, ASLEEP)
            return
        like = offer.weight_version, offer.adapter, offer.pictures
        offered = Offered(offer.ticket, offer.num_tokens, offer.digest, offer.start, *like)
        link.to_prefill.append(offered)
        if self._chance(self.faults.doubled):
            link.to_prefill.append(offered)

    def _decline(self, what: Decline | Offer, why: Failure) -> None:
        if not self._chance(self.faults.lost):
            self.declined.append(Offered(what.ticket, what.num_tokens, what.digest, 0, declined=why))

    def _send(self, link: Link, send: Send) -> None:
        if not link.alive:
            return
        if self._chance(self.faults.lost):
            self._damage(link)
        elif self._chance(self.faults.altered):
            self.damage_all(link, "a checksum differs")
        places = Places(self.prefill, send.spans, self.prefill.of_room(link.ticket.room))
        link.unread.append((places, send.tail))

    def _withdraw(self, half: Half, link: Link, order: Withdraw) -> None:
        if link.alive:
            self.hurt(link.ticket.room)
            other = link.to_decode if half is self.prefill else link.to_prefill
            if other is link.to_decode or link.known:
                other.append(Broken(link.ticket, order.failure))
            else:
                other.clear()
                self._decline(link.offer, order.failure)
        link.alive = False

    def _damage(self, link: Link) -> None:
        """Something is lost, and nobody notices."""
        link.damaged = True
        self.hurt(link.ticket.room)

    def damage_all(self, link: Link, why: str) -> None:
        """Both sides hear that it will not come to its end."""
        self.hurt(link.ticket.room)
        broken = Broken(link.ticket, Failure.of(EngineError(why, code="transfer_failed")))
        if link.alive:
            link.to_decode.append(broken)
            if link.known:
                link.to_prefill.append(broken)
            else:
                link.to_prefill.clear()
        link.alive = False

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self._chance(self.faults.death):
            for link in self.links.values():
                self.damage_all(link, "the connection is closed")
        if self.declined and not self._chance(self.faults.late):
            self.prefill.take(self.declined.popleft())
        links = list(self.links.values())
        self.rng.shuffle(links)
        for link in links:
            if not self._chance(self.faults.late):
                self._move(link)

    def _move(self, link: Link) -> None:
        moves = list(self._moves(link))
        if moves:
            self.rng.choice(moves)()
        elif not link.alive:
            self._close(link)

    def _moves(self, link: Link) -> Iterator[Callable[[], None]]:
        if link.to_prefill:
            yield lambda: self._tell_prefill(link)
        if link.to_decode:
            yield lambda: self._tell_decode(link)
        if link.unread:
            yield lambda: self._read(link)
        if link.unwritten:
            yield lambda: self._write(link)
        has_it = link.ticket in self.prefill.scheduler.handoff.tickets.open
        if link.alive and has_it and self._chance(0.1):
            yield lambda: self.decode.take(Renewed(link.ticket))

    def _tell_prefill(self, link: Link) -> None:
        event = link.to_prefill.popleft()
        link.known = True
        self.prefill.take(event)

    def _tell_decode(self, link: Link) -> None:
        self.decode.take(link.to_decode.popleft())

    def _read(self, link: Link) -> None:
        places, tail = link.unread.popleft()
        if not link.alive and self._chance(0.5):
            return
        places.check("there is read from", cached=True)
        link.unwritten.append((self._words(link, places), tail))

    def _write(self, link: Link) -> None:
        words, tail = link.unwritten.popleft()
        if not link.alive and self._chance(0.5):
            return
        self.num_late += not link.alive
        link.to.check("there is written to", cached=False)
        self._put(link, words)
        if tail and link.alive and not link.damaged:
            self._over(link, tail)

    def _over(self, link: Link, tail: Tail) -> None:
        """All is there: but for a token, where prefill has computed another prompt than that."""
        self.num_arrived += 1
        if self._chance(self.faults.altered):
            self.hurt(link.ticket.room)
            tail = replace(tail, num_tokens=tail.num_tokens - 1)
            self.altered.add(link.ticket)
            last = link.offer.spans["kv"].ids[-1:]
            self.decode.runner.pages.by_slot[last] = POISON
        self.decode.arrived(link.ticket.room, tail)
        link.to_decode.append(Arrived(link.ticket, tail))
        if self._chance(self.faults.lost):
            self.hurt(link.ticket.room)
            lost = Failure.of(EngineError("nothing was heard", code="transfer_failed"))
            link.to_prefill.append(Broken(link.ticket, lost))
        else:
            link.to_prefill.append(Sent(link.ticket))
        link.alive = False

    def _close(self, link: Link) -> None:
        del self.links[link.ticket]
        closings = [(self.prefill, Closed(link.ticket))] if link.known else []
        closings.append((self.decode, Closed(link.ticket)))
        self.rng.shuffle(closings)
        for half, closed in closings:
            half.take(closed)

    def _chance(self, p: float) -> bool:
        return p > 0 and self.rng.random() < p

    # -- words -----------------------------------------------------------------------------------------------------

    def _words(self, link: Link, places: Places) -> Words:
        found: Words = {}
        for kind, span in places.spans.items():
            if kind in BY_SLOT:
                positions, at = span.ids[:0], span.ids
            else:
                positions = _positions(span, self.prefill.page_size, link.offer.num_tokens)
                at = _at(span, positions, self.prefill.page_size)
            found[kind] = positions, [memory[at].copy() for memory in self.prefill.words(kind)]
        return found

    def _put(self, link: Link, words: Words) -> None:
        for kind, (positions, values) in words.items():
            span = link.offer.spans[kind]
            wanted: Any = slice(None)
            at = span.ids
            if kind not in BY_SLOT:
                wanted = np.isin(positions, _positions(span, self.decode.page_size, link.offer.num_tokens))
                at = _at(span, positions[wanted], self.decode.page_size)
            for memory, part in zip(self.decode.words(kind), values, strict=True):
                memory[at] = part[wanted]


def _positions(span: Span, page_size: int, num_tokens: int) -> I64:
    return np.arange(span.start, min(num_tokens, span.start + len(span.ids) * page_size), dtype=np.int64)


def _at(span: Span, positions: I64, page_size: int) -> I64:
    pages = span.ids[(positions - span.start) // page_size]
    at: I64 = pages * page_size + positions % page_size
    return at

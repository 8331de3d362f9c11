"""Prefill's role: the decode engines that may connect, the places that they offer, and the chunks sent to them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from forebay.base.errors import OfferError, WireError
from forebay.base.log import event, get_logger
from forebay.requests.pieces import PlacesByPosition, extents
from forebay.requests.transfers import Broken, Closed, Offered, Order, Rest, Send, Sent, Span, Tail, Ticket, Withdraw
from forebay.requests.updates import Failure
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import Connection, ConnectionUser, LocalEngine, Loop, tune
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.session.peers import PrefillSide, SessionWithDecode
from forebay.transfer.state.tickets import PREFILL, Departing, PrefillAction, PrefillEvent, Shipped, step
from forebay.transfer.wire import frames

MAX_STRANGERS: Final = 64  # connections that have not proved that they know the key
MAX_SESSIONS: Final = 1 << 10
MAX_KNOWN: Final = 1 << 12  # decode engines whose last epoch is remembered

log = get_logger("transfer")


@dataclass(slots=True)
class Shipment:
    """A ticket on prefill. `unwritten` pieces are with the data thread; `moved_at` is the time of its last progress."""

    ticket: Ticket
    session: SessionWithDecode
    places: dict[str, Span]
    departing: Departing
    moved_at: float
    state: Shipped = Shipped.OPEN
    unwritten: int = 0
    tail: Tail | None = None
    failure: Failure | None = None


class Shipments:
    """The tickets of all sessions. `sessions` are those that there are just now, by decode engine."""

    def __init__(
        self, engine: LocalEngine, loop: Loop, chunks: DataThread, sessions: dict[str, SessionWithDecode]
    ) -> None:
        self._engine, self._loop, self._chunks, self._sessions = engine, loop, chunks, sessions
        self.open: dict[bytes, Shipment] = {}

    # -- what decode says ------------------------------------------------------------------------------------------

    def on_frame(self, session: SessionWithDecode, frame: object) -> None:
        """Take what a decode engine says of its tickets."""
        match frame:
            case frames.Offering():
                self._offer(session, frame)
            case frames.Declined():
                self.decline(session.hello, frame)
            case frames.Settled(nonce):
                shipment = self._of(session, nonce)
                if shipment is not None:
                    self._step(shipment, PrefillEvent.SETTLED)
            case frames.Withdrawn(nonce, failure):
                shipment = self._of(session, nonce)
                if shipment is None:
                    session.send(frames.Fenced(nonce))
                else:
                    self._end(shipment, failure, PrefillEvent.PEER_FAILED)

    def _offer(self, session: SessionWithDecode, frame: frames.Offering) -> None:
        ticket = Ticket(session.hello.instance, frame.room, frame.nonce)
        if frame.nonce in self.open:
            raise WireError(f"the ticket of room {frame.room} was offered twice")
        try:
            if len(self.open) >= frames.MAX_TICKETS:
                raise OfferError(f"{frames.MAX_TICKETS} tickets are open: no more are taken", code="invalid_offer")
            places = {kind: place.span() for kind, place in frame.places.items()}
            departing = Departing(self._engine.shapes, extents(session.shapes, places, frame.num_tokens))
        except OfferError as error:
            session.send(frames.Withdrawn(frame.nonce, Failure.of(error)))  # decode asks for the fence
            return
        self.open[frame.nonce] = Shipment(ticket, session, places, departing, self._loop.clock())
        self._loop.emit(frame.event(ticket))

    def decline(self, hello: frames.Hello, frame: frames.Declined) -> None:
        """Report that decode will not offer places for a prompt."""
        ticket = Ticket(hello.instance, frame.room, frame.nonce)
        self._loop.emit(Offered(ticket, frame.num_tokens, frame.digest, 0, declined=frame.failure))

    def _of(self, session: SessionWithDecode, nonce: bytes) -> Shipment | None:
        """Return the shipment of a ticket from any session of this engine: an earlier one's tickets may still have to
        be closed."""
        shipment = self.open.get(nonce)
        return shipment if shipment is not None and shipment.ticket.peer == session.hello.instance else None

    # -- orders ----------------------------------------------------------------------------------------------------

    def send(self, order: Send) -> None:
        """Send what the order names, unless its ticket has broken meanwhile."""
        shipment = self.open.get(order.ticket.nonce)
        if shipment is None or shipment.state is not Shipped.OPEN:
            return
        try:
            self._depart(shipment, order)
        except OfferError as error:
            self._end(shipment, Failure.of(error), PrefillEvent.FAILED)

    def _depart(self, shipment: Shipment, order: Send) -> None:
        pieces = shipment.departing.send(order.spans)
        if order.tail is not None:
            shipment.departing.check_complete()
        session, shipment.tail = shipment.session, order.tail
        there = PlacesByPosition(session.shapes, shipment.places)
        theirs = [there(piece.kind, piece.first, piece.end) for piece in pieces]
        shipment.unwritten += len(pieces)
        shipment.moved_at = self._loop.clock()
        if pieces:
            self._chunks.submit(data_thread.Write(session.number, shipment.ticket.nonce, pieces, theirs))
        self._complete(shipment)

    def withdraw(self, order: Withdraw) -> None:
        """Break the ticket, unless it is closed."""
        shipment = self.open.get(order.ticket.nonce)
        if shipment is not None:
            self._end(shipment, order.failure, PrefillEvent.FAILED)

    # -- how tickets end -------------------------------------------------------------------------------------------

    def _step(self, shipment: Shipment, what: PrefillEvent) -> None:
        """Change the state of a ticket by an event, and act. Raises WireError if its state has no such event."""
        shipment.state, actions = step(PREFILL, shipment.state, what)
        for action in actions:
            self._act(shipment, action)

    def _act(self, shipment: Shipment, action: PrefillAction) -> None:
        ticket, session, failure, tail = shipment.ticket, shipment.session, shipment.failure, shipment.tail
        match action:
            case PrefillAction.COMPLETE if tail is not None:
                session.send(frames.Completed(ticket.nonce, tail))
            case PrefillAction.WITHDRAW if failure is not None:
                session.send(frames.Withdrawn(ticket.nonce, failure))
            case PrefillAction.FENCE:
                latest = self._sessions.get(ticket.peer)
                if latest is not None:
                    latest.send(frames.Fenced(ticket.nonce))
            case PrefillAction.DROP:
                self._chunks.submit(data_thread.Drop(ticket.nonce))
            case PrefillAction.REPORT_SENT:
                self._loop.emit(Sent(ticket))
            case PrefillAction.REPORT_BROKEN if failure is not None:
                self._loop.emit(Broken(ticket, failure))
            case PrefillAction.REPORT_CLOSED:
                self._loop.emit(Closed(ticket))
            case _:
                raise AssertionError(f"{action} has nothing to act on: {shipment}")

    def _complete(self, shipment: Shipment) -> None:
        """The tail goes when all before it has left."""
        if shipment.tail is not None and not shipment.unwritten:
            self._step(shipment, PrefillEvent.WRITTEN)

    def _end(self, shipment: Shipment, failure: Failure, what: PrefillEvent) -> None:
        """Break a ticket, once."""
        shipment.failure = failure
        self._step(shipment, what)

    def on_wrote(self, report: data_thread.Wrote) -> None:
        """Count a piece that was sent, and notify decode of one that was written to its memory."""
        shipment = self.open.get(report.chunk.nonce)
        if shipment is None:
            return
        shipment.unwritten -= 1
        shipment.moved_at = self._loop.clock()
        if shipment.session.is_one_sided:  # decode has not seen it
            shipment.session.send(report.chunk)
        self._complete(shipment)

    def on_dropped(self, nonce: bytes) -> None:
        """Close a ticket that the data thread has dropped."""
        shipment = self.open.pop(nonce, None)
        if shipment is not None:
            self._step(shipment, PrefillEvent.DROPPED)

    def break_all(self, session: SessionWithDecode, failure: Failure) -> None:
        """Break the tickets of a session that is over."""
        for shipment in [*self.open.values()]:
            if shipment.session is session:
                self._end(shipment, failure, PrefillEvent.PEER_FAILED)

    def lose(self, nonce: bytes, failure: Failure) -> None:
        """End the session of a ticket whose order or report could not be handled."""
        shipment = self.open.get(nonce)
        if shipment is not None:
            shipment.session.lose(failure)
            self._end(shipment, failure, PrefillEvent.PEER_FAILED)

    def held(self, session: SessionWithDecode) -> list[bytes]:
        """Return the tickets that this engine still holds; none while it takes no events, so that a hanging engine
        renews nothing. Decode renews only tickets that have not ended there."""
        if self._loop.events.untaken_s > self._engine.options.lease_s:
            return []
        return [shipment.ticket.nonce for shipment in self.open.values() if shipment.session is session]

    def tick(self, now: float) -> None:
        """Break the tickets whose lease has ended."""
        lease_s = self._engine.options.lease_s
        for shipment in [*self.open.values()]:
            waits = shipment.unwritten or shipment.state is Shipped.COMPLETED
            if waits and now - shipment.moved_at > lease_s:
                failure = frames.lease_timeout(shipment.session.where, lease_s)
                self._end(shipment, failure, PrefillEvent.FAILED)


@dataclass(slots=True)
class Guest:
    """A connection that is no session yet."""

    since: float
    hello: frames.Hello | None = None


class PrefillStage(ConnectionUser, PrefillSide):
    """All decode engines that have connected, and guests: connections that are no session yet. Runs on the loop's
    thread."""

    num_unfenced = 0
    _resting = False

    def __init__(self, engine: LocalEngine, loop: Loop, chunks: DataThread, listener: socket.socket) -> None:
        self._engine, self._loop, self._chunks, self._listener = engine, loop, chunks, listener
        self._sessions: dict[str, SessionWithDecode] = {}  # by decode engine
        self._shipments = Shipments(engine, loop, chunks, self._sessions)
        self._numbers = count(1)
        self._guests: dict[Connection, Guest] = {}
        self._epochs: dict[str, int] = {}  # the last of each that there ever was
        loop.listen(listener, self._accept)

    def transport(self, address: tuple[str, int]) -> str:
        """Return "": caches come from nowhere."""
        return ""

    # -- guests ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
            tune(sock)
        except OSError:
            return
        if len(self._guests) >= MAX_STRANGERS:
            oldest = next(iter(self._guests))
            self.on_lost(oldest, frames.peer_lost(oldest.where, "too many strangers"))
        link = Connection(sock, f"{address[0]}:{address[1]}", self._loop.clock, self._engine.options.chaos)
        link.await_greeting(self._engine.options.cluster_key)
        self._guests[link] = Guest(self._loop.clock())
        self._loop.watch(link, self)

    def on_frame(self, link: Connection, frame: object) -> None:
        guest = self._guests[link]
        match frame:
            case frames.Hello() if guest.hello is None:
                guest.hello = frame
                link.admit(self._engine.options.cluster_key, frame, self._engine.instance)
            case frames.Introduce() if guest.hello is not None and not guest.hello.data:
                self._introduce(link, guest.hello, frame)
            case frames.Attach() if guest.hello is not None and guest.hello.data:
                self._attach(link, guest.hello)
            case frames.Declined() if guest.hello is not None:  # where it was refused
                self._shipments.decline(guest.hello, frame)
            case _:
                raise WireError(f"a {type(frame).__name__} frame arrived instead of a greeting")

    def _introduce(self, link: Connection, hello: frames.Hello, frame: frames.Introduce) -> None:
        engine = self._engine
        if hello.epoch <= self._epochs.get(hello.instance, 0):
            raise WireError(f"epoch {hello.epoch} of {hello.instance[:8]} is over")
        if len(self._sessions) >= MAX_SESSIONS and hello.instance not in self._sessions:
            raise WireError(f"{MAX_SESSIONS} decode engines have sessions: no more are taken")
        differs = frames.mismatch(engine.layout, frame.layout)
        mine = [name for name in engine.transports if engine.may_use(name, frame.machine)]
        transport = next((name for name in frame.transports if name in mine), "")
        if differs or not transport:
            failure = frames.layout_mismatch(differs) if differs else frames.no_transport(mine, frame.transports)
            log.warning(event("decode_refused", where=link.where, why=failure.message))
            link.send(frames.Refused(failure))
            return
        old = self._sessions.get(hello.instance)
        if old is not None:
            old.lose(frames.peer_lost(old.where, "it began a new session"))
        session = SessionWithDecode(
            engine,
            self._loop,
            self._chunks,
            self,
            link=link,
            hello=hello,
            number=next(self._numbers),
            transport=transport,
            page_size=frame.layout.page_size,
        )
        del self._guests[link]
        self._loop.watch(link, session)
        self._sessions[hello.instance] = session
        self._remember(hello)
        session.send(frames.Welcome(engine.layout, transport, engine.machine, os.getpid()))

    def _remember(self, hello: frames.Hello) -> None:
        """The session's own nonces already keep a recorded greeting out, so old epochs may be forgotten."""
        self._epochs.pop(hello.instance, None)
        self._epochs[hello.instance] = hello.epoch
        if len(self._epochs) > MAX_KNOWN:
            del self._epochs[next(iter(self._epochs))]

    def _attach(self, link: Connection, hello: frames.Hello) -> None:
        """A connection of chunks: of the session of this epoch, and no other."""
        session = self._sessions.get(hello.instance)
        if session is None or session.hello.epoch != hello.epoch or session.is_one_sided or session.is_joined:
            raise WireError(f"no session {hello.epoch} of {hello.instance[:8]} waits for a connection of chunks")
        del self._guests[link]
        self._loop.unwatch(link)
        session.join(link.writer(self._engine.memory, self._engine.shapes))

    def on_lost(self, link: Connection, failure: Failure) -> None:
        if self._guests.pop(link, None) is not None:
            log.warning(event("connection_refused", where=link.where, why=failure.message))
            self._loop.unwatch(link)
            link.close()

    # -- sessions --------------------------------------------------------------------------------------------------

    def on_joined(self, session: SessionWithDecode) -> None:
        if self._resting:
            session.send(frames.Resting(True))

    def on_session_frame(self, session: SessionWithDecode, frame: object) -> None:
        self._shipments.on_frame(session, frame)

    def on_session_lost(self, session: SessionWithDecode, failure: Failure) -> None:
        del self._sessions[session.hello.instance]
        self._shipments.break_all(session, failure)

    def held(self, session: SessionWithDecode) -> list[bytes]:
        return self._shipments.held(session)

    # -- orders and reports ----------------------------------------------------------------------------------------

    def handle(self, what: Order | data_thread.Report) -> None:
        """Carry out an order, or take a report."""
        match what:
            case Send():
                self._shipments.send(what)
            case Withdraw():
                self._shipments.withdraw(what)
            case Rest(asleep):
                self._resting = asleep
                for session in [*self._sessions.values()]:
                    session.send(frames.Resting(asleep))
            case data_thread.Wrote():
                self._shipments.on_wrote(what)
            case data_thread.Dropped(nonce):
                self._shipments.on_dropped(nonce)
            case data_thread.Lost():
                self.on_chunks_lost(what)
            case _:
                raise AssertionError(f"prefill was given {what!r}")

    def on_chunks_lost(self, report: data_thread.Lost) -> None:
        """End the session whose connection of chunks has ended."""
        for session in [*self._sessions.values()]:
            if session.number == report.session:
                session.lose(frames.peer_lost(session.where, report.why))

    def lose_ticket(self, nonce: bytes, failure: Failure) -> None:
        """End the session of a ticket whose order or report could not be handled."""
        self._shipments.lose(nonce, failure)

    def end_sessions(self, why: str) -> None:
        """End all sessions; `why` goes to the log and into the tickets that break."""
        for session in [*self._sessions.values()]:
            session.lose(frames.peer_lost(session.where, why))

    def close(self) -> None:
        """End all sessions, and close the connections of guests."""
        self.end_sessions("this engine ends")
        for link in self._guests:
            link.close()

    def tick(self) -> None:
        now, limit_s = self._loop.clock(), self._engine.options.bootstrap_timeout_s
        for link, guest in [*self._guests.items()]:
            if now - guest.since > limit_s:
                self.on_lost(link, frames.bootstrap_timeout(link.where, limit_s))
        for session in [*self._sessions.values()]:
            self._loop.guard.run(session.where, partial(session.tick, now), session.lose)
        self._shipments.tick(now)

"""Prefill's half: who may connect, what they have places for, and what of it has been sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final

import msgspec

from forebay.base.errors import OfferError, WireError
from forebay.base.log import event, get_logger
from forebay.requests.pieces import KindShape, Whereabouts, extents
from forebay.requests.transfers import Broken, Closed, Offered, Rest, Send, Sent, Ticket, Withdraw
from forebay.requests.updates import Failure
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import Connection, ConnectionLost
from forebay.transfer.session.desk import Desk
from forebay.transfer.session.layout import mismatch
from forebay.transfer.session.shipments import Guest, Session, Shipment, Stage
from forebay.transfer.state.tickets import Departing
from forebay.transfer.wire import frames
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.memory import Writer
from forebay.transfer.wire.tcp import TcpWriter, tune

MAX_STRANGERS: Final = 64  # connections that have not proved that they know the key
MAX_SESSIONS: Final = 1 << 10
MAX_KNOWN: Final = 1 << 12  # decode engines whose last epoch is remembered
UNLIMITED: Final = frames.MAX_ID + 1  # ids of a pool that is not written to from here

log = get_logger("transfer")


class PrefillStage:
    def __init__(self, desk: Desk, listener: socket.socket) -> None:
        self._desk, self._listener = desk, listener
        self._guests: dict[Connection, Guest] = {}
        self._by_link: dict[Connection, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._sessions: dict[str, Session] = {}  # by decode engine
        self._epochs: dict[str, int] = {}  # the last of each that there ever was
        self._shipments: dict[bytes, Shipment] = {}
        self._numbers = count(1)
        self._rests = False

    # -- connections -----------------------------------------------------------------------------------------------

    def accept(self) -> None:
        try:
            sock, address = self._listener.accept()
            tune(sock)
        except OSError:
            return
        if len(self._guests) >= MAX_STRANGERS:
            oldest = next(iter(self._guests))
            self.on_lost(oldest, frames.peer_lost(oldest.where, "too many strangers"))
        link = Connection(sock, f"{address[0]}:{address[1]}", self._desk.clock, self._desk.options.chaos)
        link.await_greeting(self._desk.options.cluster_key)
        self._guests[link] = Guest(self._desk.clock())
        self._desk.watch(link, self)

    def on_frame(self, link: Connection, frame: object) -> None:
        session = self._by_link.get(link)
        if session is not None:
            self._on_session_frame(session, frame)
            return
        guest = self._guests[link]
        match frame:
            case frames.Hello() if guest.hello is None:
                guest.hello = frame
                link.admit(self._desk.options.cluster_key, frame, self._desk.instance)
            case frames.Introduce() if guest.hello is not None and not guest.hello.data:
                self._introduce(link, guest.hello, frame)
            case frames.Attach() if guest.hello is not None and guest.hello.data:
                self._attach(link, guest.hello)
            case frames.Declined() if guest.hello is not None:  # where it was refused
                self._declined(guest.hello, frame)
            case _:
                raise WireError(f"a {type(frame).__name__} frame came where a greeting was due")

    def _introduce(self, link: Connection, hello: frames.Hello, frame: frames.Introduce) -> None:
        desk = self._desk
        if hello.epoch <= self._epochs.get(hello.instance, 0):
            raise WireError(f"epoch {hello.epoch} of {hello.instance[:8]} is over")
        if len(self._sessions) >= MAX_SESSIONS and hello.instance not in self._sessions:
            raise WireError(f"{MAX_SESSIONS} decode engines have sessions: no more are taken")
        differs = mismatch(desk.layout, frame.layout)
        mine = [name for name in desk.transports if name != "shm" or frame.machine == desk.machine]
        transport = next((name for name in frame.transports if name in mine), "")
        if differs or not transport:
            failure = frames.layout_mismatch(differs) if differs else frames.no_transport(mine, frame.transports)
            log.warning(event("decode_refused", where=link.where, why=failure.message))
            link.send(frames.Refused(failure))
            return
        old = self._sessions.get(hello.instance)
        if old is not None:
            self._lose(old, frames.peer_lost(old.where, "it began a new session"))
        shapes = {
            kind: replace(shape, page_size=frame.layout.page_size if shape.by_token else 1, num_ids=UNLIMITED)
            for kind, shape in desk.shapes.items()
        }
        now = desk.clock()
        session = Session(link, hello, next(self._numbers), transport, shapes, frame.layout.page_size, now, beat_at=now)
        del self._guests[link]
        self._by_link[link] = self._by_number[session.number] = session
        self._sessions[hello.instance] = session
        self._remember(hello)
        self._send(session, frames.Welcome(desk.layout, transport, desk.machine, os.getpid()))

    def _remember(self, hello: frames.Hello) -> None:
        """The session's own nonces already keep a recorded greeting out, so old epochs may be forgotten."""
        self._epochs.pop(hello.instance, None)
        self._epochs[hello.instance] = hello.epoch
        if len(self._epochs) > MAX_KNOWN:
            del self._epochs[next(iter(self._epochs))]

    def _attach(self, link: Connection, hello: frames.Hello) -> None:
        """A connection of chunks: of the session of this epoch, and no other."""
        session = self._sessions.get(hello.instance)
        if session is None or session.hello.epoch != hello.epoch or session.transport != "tcp" or session.is_joined:
            raise WireError(f"no session {hello.epoch} of {hello.instance[:8]} waits for a connection of chunks")
        del self._guests[link]
        self._desk.unwatch(link)
        desk = self._desk
        faults = Faults(desk.options.chaos, desk.clock)
        self._join(session, TcpWriter(link.sock, link.encoder, desk.memory, desk.staging(), faults))

    def _invited(self, session: Session, address: bytes) -> None:
        desk = self._desk

        def join() -> Callable[[], None]:
            writer, shapes = desk.one_sided[session.transport].join(address, session.page_size)
            return lambda: self._join(session, writer, shapes)

        desk.beside(session.where, join, partial(self._lose, session))

    def _join(self, session: Session, writer: Writer, shapes: dict[str, KindShape] | None = None) -> None:
        if self._by_number.get(session.number) is not session:
            writer.close()
            return
        session.shapes, session.is_joined = shapes or session.shapes, True
        self._desk.data_thread.submit(data_thread.AddWriter(session.number, writer))
        log.info(event("decode_joined", where=session.where, transport=session.transport))
        self._send(session, frames.Joined())
        session.link.joined()
        if self._rests:
            self._send(session, frames.Resting(True))

    # -- what decode says ------------------------------------------------------------------------------------------

    def _on_session_frame(self, session: Session, frame: object) -> None:
        match frame:
            case frames.Beat():
                pass
            case frames.Invite(address) if session.transport != "tcp" and not session.is_joined:
                self._invited(session, address)
            case frames.Offering() if session.is_joined:
                self._offered(session, frame)
            case frames.Declined():
                self._declined(session.hello, frame)
            case frames.Settled(nonce):
                shipment = self._of(session, nonce)
                if shipment is not None and shipment.stage is Stage.COMPLETED:
                    self._desk.emit(Sent(shipment.ticket))
                    self._drop(shipment, Stage.CLOSING)
            case frames.Withdrawn(nonce, failure):
                shipment = self._of(session, nonce)
                if shipment is None:
                    self._send(session, frames.Fenced(nonce))
                else:
                    self._break(shipment, failure, tell=False)
            case _:
                raise WireError(f"a {type(frame).__name__} frame came where none was due")

    def _of(self, session: Session, nonce: bytes) -> Shipment | None:
        """Return the shipment of a ticket from any session of this engine: an earlier one's tickets may still have to
        be closed."""
        shipment = self._shipments.get(nonce)
        return shipment if shipment is not None and shipment.ticket.peer == session.hello.instance else None

    def _offered(self, session: Session, frame: frames.Offering) -> None:
        ticket = Ticket(session.hello.instance, frame.room, frame.nonce)
        if frame.nonce in self._shipments:
            raise WireError(f"the ticket of room {frame.room} was offered twice")
        try:
            if len(self._shipments) >= frames.MAX_TICKETS:
                raise OfferError(f"{frames.MAX_TICKETS} tickets are open: no more are taken", code="invalid_offer")
            places = {kind: place.span() for kind, place in frame.places.items()}
            departing = Departing(self._desk.shapes, extents(session.shapes, places, frame.num_tokens))
        except OfferError as error:
            self._send(session, frames.Withdrawn(frame.nonce, Failure.of(error)))  # decode asks for the fence
            return
        self._shipments[frame.nonce] = Shipment(ticket, session, places, departing, self._desk.clock())
        self._desk.emit(Offered(ticket, frame.num_tokens, frame.digest, frame.start, frame.weight_version))

    def _declined(self, hello: frames.Hello, frame: frames.Declined) -> None:
        ticket = Ticket(hello.instance, frame.room, frame.nonce)
        self._desk.emit(Offered(ticket, frame.num_tokens, frame.digest, 0, declined=frame.failure))

    # -- orders ----------------------------------------------------------------------------------------------------

    def send(self, order: Send) -> None:
        """Send what the order names, unless its ticket has broken meanwhile."""
        shipment = self._shipments.get(order.ticket.nonce)
        if shipment is None or shipment.stage is not Stage.OPEN:
            return
        try:
            self._depart(shipment, order)
        except OfferError as error:
            self._break(shipment, Failure.of(error), tell=True)

    def _depart(self, shipment: Shipment, order: Send) -> None:
        pieces = shipment.departing.send(order.spans)
        if order.tail is not None:
            shipment.departing.check_complete()
        session, shipment.tail = shipment.session, order.tail
        there = Whereabouts(session.shapes, shipment.places)
        theirs = [there(piece.kind, piece.first, piece.end) for piece in pieces]
        shipment.unwritten += len(pieces)
        shipment.moved_at = self._desk.clock()
        if pieces:
            self._desk.data_thread.submit(data_thread.Write(session.number, shipment.ticket.nonce, pieces, theirs))
        self._complete(shipment)

    def withdraw(self, order: Withdraw) -> None:
        shipment = self._shipments.get(order.ticket.nonce)
        if shipment is not None:
            self._break(shipment, order.failure, tell=True)

    def rest(self, order: Rest) -> None:
        self._rests = order.asleep
        for session in [*self._by_number.values()]:
            self._send(session, frames.Resting(self._rests))

    # -- how tickets end -------------------------------------------------------------------------------------------

    def _complete(self, shipment: Shipment) -> None:
        """The tail goes when all before it has left."""
        if shipment.tail is not None and not shipment.unwritten and shipment.stage is Stage.OPEN:
            shipment.stage = Stage.COMPLETED
            self._send(shipment.session, frames.Completed(shipment.ticket.nonce, shipment.tail))

    def _break(self, shipment: Shipment, failure: Failure, *, tell: bool) -> None:
        """Once. Decode, where it does not know, is told at once; that all has ended, when it has."""
        if shipment.stage not in (Stage.OPEN, Stage.COMPLETED):
            return
        self._desk.emit(Broken(shipment.ticket, failure))
        if tell:
            self._send(shipment.session, frames.Withdrawn(shipment.ticket.nonce, failure))
        self._drop(shipment, Stage.BROKEN)

    def _drop(self, shipment: Shipment, stage: Stage) -> None:
        shipment.stage = stage
        self._desk.data_thread.submit(data_thread.Drop(shipment.ticket.nonce))

    def on_wrote(self, report: data_thread.Wrote) -> None:
        shipment = self._shipments.get(report.chunk.nonce)
        if shipment is None:
            return
        shipment.unwritten -= 1
        shipment.moved_at = self._desk.clock()
        if shipment.session.transport != "tcp":  # decode has not seen it
            self._send(shipment.session, report.chunk)
        self._complete(shipment)

    def on_dropped(self, report: data_thread.Dropped) -> None:
        shipment = self._shipments.pop(report.nonce, None)
        if shipment is None:
            return
        session = self._sessions.get(shipment.ticket.peer)
        if shipment.stage is Stage.BROKEN and session is not None:
            self._send(session, frames.Fenced(report.nonce))
        self._desk.emit(Closed(shipment.ticket))

    # -- loss ------------------------------------------------------------------------------------------------------

    def on_lost(self, link: Connection, failure: Failure) -> None:
        session = self._by_link.get(link)
        if session is not None:
            self._lose(session, failure)
        elif self._guests.pop(link, None) is not None:
            log.warning(event("connection_refused", where=link.where, why=failure.message))
            self._desk.unwatch(link)
            link.close()

    def on_mover_lost(self, report: data_thread.Lost) -> None:
        session = self._by_number.get(report.session)
        if session is not None:
            self._lose(session, frames.peer_lost(session.where, report.why))

    def _lose(self, session: Session, failure: Failure) -> None:
        if self._by_number.pop(session.number, None) is None:
            return
        log.warning(event("decode_lost", where=session.where, code=failure.code, why=failure.message))
        del self._by_link[session.link]
        del self._sessions[session.hello.instance]
        self._desk.unwatch(session.link)
        session.link.close()
        self._desk.data_thread.submit(data_thread.EndSession(session.number))
        for shipment in self._of_session(session):
            self._break(shipment, failure, tell=False)

    def lose_ticket(self, nonce: bytes, failure: Failure) -> None:
        """End the session of a ticket whose order or report could not be handled."""
        shipment = self._shipments.get(nonce)
        if shipment is not None:
            self._lose(shipment.session, failure)
            self._break(shipment, failure, tell=False)

    def end_sessions(self, why: str) -> None:
        for session in [*self._by_number.values()]:
            self._lose(session, frames.peer_lost(session.where, why))

    def close(self) -> None:
        self.end_sessions("this engine ends")
        for link in self._guests:
            link.close()

    def _of_session(self, session: Session) -> Iterator[Shipment]:
        return (shipment for shipment in [*self._shipments.values()] if shipment.session is session)

    def _send(self, session: Session, frame: msgspec.Struct) -> None:
        if session.link not in self._by_link:
            return
        try:
            session.link.send(frame)
        except (ConnectionLost, WireError) as error:
            failure = frames.peer_lost(session.where, str(error))
            self._desk.call(lambda: self._lose(session, failure))

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        desk = self._desk
        now, options = desk.clock(), desk.options
        for link, guest in [*self._guests.items()]:
            if now - guest.since > options.bootstrap_timeout_s:
                self.on_lost(link, frames.bootstrap_timeout(link.where, options.bootstrap_timeout_s))
        for session in [*self._by_number.values()]:
            desk.guard.run(session.where, partial(self._tick_session, session, now), partial(self._lose, session))
        for shipment in [*self._shipments.values()]:
            waits = shipment.unwritten or shipment.stage is Stage.COMPLETED
            if waits and now - shipment.moved_at > options.lease_s:
                self._break(shipment, frames.lease_timeout(shipment.session.where, options.lease_s), tell=True)

    def _tick_session(self, session: Session, now: float) -> None:
        if now - session.beat_at >= self._desk.options.heartbeat_s:
            session.beat_at = now
            self._send(session, frames.Beat(self._held(session)))
        if now - session.link.heard > self._desk.silence_s:
            self._lose(session, frames.heartbeat_timeout(session.where, self._desk.silence_s))

    def _held(self, session: Session) -> list[bytes]:
        """Return the tickets that this engine still holds; none while it takes no events, so that a hanging engine
        renews nothing. Decode renews only what has not come to its end there."""
        if self._desk.untaken_s() > self._desk.options.lease_s:
            return []
        return [shipment.ticket.nonce for shipment in self._of_session(session)]

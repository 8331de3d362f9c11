"""Decode's role: offers of places to prefill servers, the chunks that have arrived in them, and when they are free
again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from forebay.base.errors import OfferError
from forebay.base.exposure import is_loopback
from forebay.base.log import event, get_logger
from forebay.requests.pieces import Chunk
from forebay.requests.transfers import Arrived, Broken, Closed, Decline, Offer, Order, Renewed, Tail, Ticket, Withdraw
from forebay.requests.updates import Failure
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import LocalEngine, Loop
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.session.peers import Address, DecodeSide, SessionWithPrefill
from forebay.transfer.state.tickets import DECODE, DecodeAction, DecodeEvent, Landing, Received, step
from forebay.transfer.wire import frames

RETRIES_PER_BEAT: Final = 4

log = get_logger("transfer")


@dataclass(slots=True)
class Receipt:
    """A ticket as decode has it. `session` is the one in which it was offered, even when that is over."""

    offer: Offer
    since: float
    state: Received = Received.WAITING
    bytes_per_s: float = 0.0
    tail: Tail | None = None
    failure: Failure | None = None
    session: SessionWithPrefill | None = None

    @property
    def ticket(self) -> Ticket:
        return self.offer.ticket

    @property
    def is_waiting(self) -> bool:
        return self.state in (Received.WAITING, Received.WAITING_LANDED)

    @property
    def has_writer(self) -> bool:
        """Whether the peer that it was offered to writes here by itself."""
        return self.session is not None and self.session.reach is not None

    @property
    def writer_is_dead(self) -> bool:
        return self.session is not None and self.session.reach is not None and self.session.reach.writer_is_dead()


class Peer(DecodeSide):
    """A prefill server by address, whichever process that is just now, and the tickets offered to it.

    One that `rests` refuses what it is offered. A peer without session, tickets and unsent frames is forgotten:
    it leaves `peers`, which it shares with the others.
    """

    def __init__(
        self,
        engine: LocalEngine,
        loop: Loop,
        chunks: DataThread,
        peers: dict[Address, Peer],
        address: Address,
        epochs: Iterator[int],
    ) -> None:
        self._engine, self._loop, self._chunks, self._peers = engine, loop, chunks, peers
        self.address, self._epochs = address, epochs
        self._may_ask = bool(engine.options.cluster_key) or is_loopback(address[0])
        self.session: SessionWithPrefill | None = None
        self.rests = False  # it has said so
        self.receipts: dict[bytes, Receipt] = {}
        self.unsent: list[tuple[float, frames.Declined]] = []  # since when they wait for a session
        self._retry_at = 0.0

    # -- orders ----------------------------------------------------------------------------------------------------

    def offer(self, receipt: Receipt) -> None:
        """Offer the places now, or in the next session; break the ticket if that can never be."""
        offer = receipt.offer
        self.receipts[offer.ticket.nonce] = receipt
        if not self._may_ask:
            self.end(receipt, frames.key_required(offer.host))
            return
        if self.rests:
            self.end(receipt, frames.peer_asleep(f"{offer.host}:{offer.port}"))
            return
        try:
            landing = Landing(self._engine.shapes, offer.spans, offer.num_tokens)
        except OfferError as error:
            self.end(receipt, Failure.of(error))
            return
        self._chunks.submit(data_thread.Expect(offer.ticket.nonce, landing))
        if self.session is not None and self.session.is_joined:
            self.step(receipt, DecodeEvent.JOINED)
        else:
            self._connect()

    def decline(self, message: Offer | Decline, failure: Failure, since: float) -> None:
        """Decline a request, so that prefill does not wait for its time-out; without a session, in the next one."""
        if not self._may_ask:
            return
        frame = frames.Declined(message.ticket.nonce, message.ticket.room, message.num_tokens, message.digest, failure)
        if self.session is not None and self.session.is_joined:
            self.session.send(frame)
        else:
            self.unsent.append((since, frame))

    # -- tickets ---------------------------------------------------------------------------------------------------

    def step(self, receipt: Receipt, what: DecodeEvent) -> None:
        """Change the state of a ticket by an event, and act. Raises WireError if its state has no such event."""
        receipt.state, actions = step(DECODE, receipt.state, what)
        for action in actions:
            self._act(receipt, action)

    def end(self, receipt: Receipt, failure: Failure, what: DecodeEvent = DecodeEvent.FAILED) -> None:
        """Break a ticket, once; where the writer reaches in by itself, its word or its death closes it."""
        receipt.failure = failure
        self.step(receipt, what)
        if receipt.state is Received.BROKEN and not receipt.has_writer:
            self.step(receipt, DecodeEvent.UNTOUCHED)

    def _act(self, receipt: Receipt, action: DecodeAction) -> None:
        ticket, failure, tail, session = receipt.ticket, receipt.failure, receipt.tail, self.session
        match action:
            case DecodeAction.OFFER if session is not None:
                receipt.session = session  # once the offer is sent, prefill too must close the ticket
                session.send(_offering(receipt.offer))
            case DecodeAction.ASK if session is not None:
                session.send(frames.Withdrawn(ticket.nonce, frames.peer_lost(session.where, "it was anew")))
            case DecodeAction.RENEW:
                self._loop.emit(Renewed(ticket))
            case DecodeAction.WITHDRAW if failure is not None:
                self._send(frames.Withdrawn(ticket.nonce, failure))
            case DecodeAction.DECLINE if failure is not None:
                self.decline(receipt.offer, failure, receipt.since)
            case DecodeAction.SETTLE:
                self._send(frames.Settled(ticket.nonce))
            case DecodeAction.DROP:
                self._chunks.submit(data_thread.Drop(ticket.nonce))
            case DecodeAction.REPORT_ARRIVED if tail is not None:
                self._loop.emit(Arrived(ticket, tail, receipt.bytes_per_s))
            case DecodeAction.REPORT_BROKEN if failure is not None:
                self._loop.emit(Broken(ticket, failure))
            case DecodeAction.REPORT_CLOSED:
                self._loop.emit(Closed(ticket))
            case _:
                raise AssertionError(f"{action} has nothing to act on: {receipt}")

    def _send(self, frame: frames.Withdrawn | frames.Settled) -> None:
        """Send a frame of the session; nothing without one, whose tickets prefill ends by itself."""
        if self.session is not None:
            self.session.send(frame)

    # -- sessions --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.session is None and self._loop.clock() >= self._retry_at:
            epoch = next(self._epochs)
            self.session = SessionWithPrefill(self._engine, self._loop, self._chunks, self.address, epoch, self)

    def on_session_frame(self, session: SessionWithPrefill, frame: object) -> None:
        match frame:
            case Chunk():
                self._chunks.submit(data_thread.Check(session.epoch, frame))
            case frames.Beat(held):
                for nonce in held:
                    if nonce in self.receipts:
                        self.step(self.receipts[nonce], DecodeEvent.RENEWED)
            case frames.Resting(asleep):
                self.rests = asleep
            case frames.Completed(nonce) | frames.Withdrawn(nonce) | frames.Fenced(nonce):
                if nonce in self.receipts:
                    self._on_ticket_frame(session, self.receipts[nonce], frame)

    def _on_ticket_frame(
        self, session: SessionWithPrefill, receipt: Receipt, frame: frames.Completed | frames.Withdrawn | frames.Fenced
    ) -> None:
        match frame:
            case frames.Completed():
                self._complete(receipt, frame.tail)
            case frames.Withdrawn():
                self.end(receipt, frame.failure)
            case frames.Fenced() if _is_of(receipt, session):  # a successor on the port cannot speak for it
                self.step(receipt, DecodeEvent.UNTOUCHED)
            case _:
                pass

    def _complete(self, receipt: Receipt, tail: Tail) -> None:
        if tail.num_tokens != receipt.offer.num_tokens:
            error = OfferError(f"prefill sent {tail.num_tokens} tokens of {receipt.offer.num_tokens}")
            self.end(receipt, Failure.of(error))
            return
        receipt.tail = tail
        self.step(receipt, DecodeEvent.COMPLETED)

    def on_joined(self, session: SessionWithPrefill) -> None:
        """Make the offers that waited, and ask about broken tickets of earlier sessions."""
        log.info(event("prefill_joined", where=session.where, shared=session.reach is not None))
        self._send_unsent(session)
        for receipt in [*self.receipts.values()]:
            self.step(receipt, DecodeEvent.JOINED)

    def on_session_refused(self, session: SessionWithPrefill, failure: Failure) -> None:
        for receipt in [*self.receipts.values()]:
            self.end(receipt, failure)
        self._send_unsent(session)

    def _send_unsent(self, session: SessionWithPrefill) -> None:
        for _, frame in self.unsent:
            session.send(frame)
        self.unsent.clear()

    def on_session_lost(self, session: SessionWithPrefill, failure: Failure) -> None:
        """Break the tickets that were offered in the session; those that wait for a session may use the next one."""
        self.session, self.rests = None, False
        self._retry_at = self._loop.clock() + self._engine.options.heartbeat_s / RETRIES_PER_BEAT
        for receipt in [*self.receipts.values()]:
            self.end(receipt, failure, DecodeEvent.SESSION_LOST)
        self.forget()

    def forget(self) -> None:
        """Leave `peers` if nothing is left to do with this server."""
        if not (self.receipts or self.unsent) and self.session is None:
            self._peers.pop(self.address, None)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send heartbeats, end tickets that have waited too long, and connect if an offer waits."""
        limit_s = self._engine.options.bootstrap_timeout_s
        if self.session is not None:
            self._loop.guard.run(self.session.where, partial(self.session.tick, now), self.session.lose)
        for receipt in [*self.receipts.values()]:
            self._end_overdue(receipt, now, limit_s)
        self.unsent = [(since, frame) for since, frame in self.unsent if now - since <= limit_s]
        unheard = (one.is_waiting or one.state is Received.BROKEN for one in self.receipts.values())
        if self.unsent or any(unheard):
            self._connect()
        self.forget()

    def _end_overdue(self, receipt: Receipt, now: float, limit_s: float) -> None:
        if receipt.is_waiting and now - receipt.since > limit_s:
            self.end(receipt, frames.bootstrap_timeout(f"{self.address[0]}:{self.address[1]}", limit_s))
        elif receipt.state is Received.BROKEN and receipt.writer_is_dead:
            self.step(receipt, DecodeEvent.UNTOUCHED)


def _offering(offer: Offer) -> frames.Offering:
    """Return the frame of an offer."""
    return frames.Offering(
        nonce=offer.ticket.nonce,
        room=offer.ticket.room,
        num_tokens=offer.num_tokens,
        digest=offer.digest,
        start=offer.start,
        places={kind: frames.Places.of(span) for kind, span in offer.spans.items()},
        weight_version=offer.weight_version,
        adapter=offer.adapter,
        pictures=offer.pictures,
    )


def _is_of(receipt: Receipt, session: SessionWithPrefill) -> bool:
    """Whether the receipt was offered to the process at the other end of `session`."""
    return receipt.session is not None and receipt.session.instance == session.instance


class DecodeStage:
    """All prefill servers that this engine has to do with, and all its tickets. Runs on the loop's thread."""

    def __init__(self, engine: LocalEngine, loop: Loop, chunks: DataThread) -> None:
        self._engine, self._loop, self._chunks = engine, loop, chunks
        self._peers: dict[Address, Peer] = {}
        self._receipts: dict[bytes, tuple[Peer, Receipt]] = {}
        self._epochs = count(1)

    @property
    def num_unfenced(self) -> int:
        """Return the number of broken tickets with places that a peer may still write to; for any thread."""
        return sum(receipt.state is Received.BROKEN for _, receipt in [*self._receipts.values()])

    def transport(self, address: Address) -> str:
        """Return the transport of the session with the prefill server there, "" without one; for any thread."""
        peer = self._peers.get(address)
        return peer.session.transport if peer is not None and peer.session is not None else ""

    def handle(self, what: Order | data_thread.Report) -> None:
        """Carry out an order, or take a report."""
        match what:
            case Offer():
                self._offer(what)
            case Decline():
                self._peer_of(what).decline(what, what.failure, self._loop.clock())
            case Withdraw(ticket, failure):
                self._break(ticket.nonce, failure)
            case data_thread.Landed():
                self._on_landed(what)
            case data_thread.Failed(nonce, failure):
                self._break(nonce, failure)
            case data_thread.Dropped(nonce):
                self._on_dropped(nonce)
            case data_thread.Lost():
                self.on_chunks_lost(what)
            case _:
                raise AssertionError(f"decode was given {what!r}")

    def _offer(self, offer: Offer) -> None:
        peer, receipt, nonce = self._peer_of(offer), Receipt(offer, self._loop.clock()), offer.ticket.nonce
        assert nonce not in self._receipts, f"the ticket of room {offer.ticket.room} has been offered before"
        self._receipts[nonce] = peer, receipt
        peer.offer(receipt)

    def _peer_of(self, order: Offer | Decline) -> Peer:
        address = order.host, order.port
        if address not in self._peers:
            self._peers[address] = Peer(self._engine, self._loop, self._chunks, self._peers, address, self._epochs)
        return self._peers[address]

    def _break(self, nonce: bytes, failure: Failure) -> None:
        if nonce in self._receipts:
            peer, receipt = self._receipts[nonce]
            peer.end(receipt, failure)

    def _on_landed(self, report: data_thread.Landed) -> None:
        if report.nonce in self._receipts:
            peer, receipt = self._receipts[report.nonce]
            receipt.bytes_per_s = report.bytes_per_s
            peer.step(receipt, DecodeEvent.LANDED)

    def _on_dropped(self, nonce: bytes) -> None:
        peer, receipt = self._receipts.pop(nonce)
        del peer.receipts[nonce]
        peer.step(receipt, DecodeEvent.DROPPED)
        peer.forget()

    def on_chunks_lost(self, report: data_thread.Lost) -> None:
        """End the session whose connection of chunks has ended."""
        for peer in [*self._peers.values()]:
            if peer.session is not None and peer.session.epoch == report.session:
                peer.session.lose(frames.peer_lost(peer.session.where, report.why))

    def lose_ticket(self, nonce: bytes, failure: Failure) -> None:
        """End the session of a ticket whose order or report could not be handled."""
        if nonce in self._receipts:
            peer, receipt = self._receipts[nonce]
            if peer.session is not None:
                peer.session.lose(failure)
            peer.end(receipt, failure)

    def end_sessions(self, why: str) -> None:
        """End all sessions; `why` goes to the log and into the tickets that break."""
        for peer in [*self._peers.values()]:
            if peer.session is not None:
                peer.session.lose(frames.peer_lost(peer.session.where, why))

    def close(self) -> None:
        """End all sessions."""
        self.end_sessions("this engine ends")

    def tick(self) -> None:
        """Let every peer send heartbeats, end tickets that have waited too long, and connect."""
        now = self._loop.clock()
        for peer in [*self._peers.values()]:
            peer.tick(now)

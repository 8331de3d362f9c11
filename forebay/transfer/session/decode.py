"""Decode's role: offers of places to prefill servers, what has come into them, and when they are nobody's again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
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
from forebay.transfer.session.peers import Address, SessionWithPrefill
from forebay.transfer.state.tickets import Landing
from forebay.transfer.wire import frames

RETRIES_PER_BEAT: Final = 4

log = get_logger("transfer")


class Stage(Enum):
    WAITING = auto()  # for a session; nobody else knows of it
    OFFERED = auto()
    ARRIVED = auto()  # all of it: to be closed
    BROKEN = auto()  # to be closed when nobody can write any more
    CLOSING = auto()  # the data thread has been told to drop it


@dataclass(slots=True)
class Receipt:
    """A ticket as decode has it. `session` is the one in which it was offered, even when that is over."""

    offer: Offer
    since: float
    stage: Stage = Stage.WAITING
    landed: data_thread.Landed | None = None
    tail: Tail | None = None
    session: SessionWithPrefill | None = None

    @property
    def ticket(self) -> Ticket:
        return self.offer.ticket

    @property
    def has_writer(self) -> bool:
        """Whether the peer that it was offered to writes here by itself."""
        return self.session is not None and self.session.reach is not None

    @property
    def writer_is_dead(self) -> bool:
        return self.session is not None and self.session.reach is not None and self.session.reach.writer_is_dead()


class Peer:
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
        self.session: SessionWithPrefill | None = None
        self.rests = False  # it has said so
        self.receipts: dict[bytes, Receipt] = {}
        self.unsaid: list[tuple[float, frames.Declined]] = []  # since when they wait for a session
        self._retry_at = 0.0

    # -- orders ----------------------------------------------------------------------------------------------------

    def offer(self, receipt: Receipt) -> None:
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
            self._make(receipt, self.session)
        else:
            self._connect()

    def decline(self, half: Offer | Decline, failure: Failure, since: float) -> None:
        """Prefill would wait for it until that took too long. Said in the next session, where there is none."""
        if not self._may_ask:
            return
        frame = frames.Declined(half.ticket.nonce, half.ticket.room, half.num_tokens, half.digest, failure)
        if self.session is not None and self.session.is_joined:
            self.session.send(frame)
        else:
            self.unsaid.append((since, frame))

    @property
    def _may_ask(self) -> bool:
        return bool(self._engine.options.cluster_key) or is_loopback(self.address[0])

    def _make(self, receipt: Receipt, session: SessionWithPrefill) -> None:
        """The offer goes out: from here on it is not ours alone to close."""
        offer = receipt.offer
        receipt.stage, receipt.session = Stage.OFFERED, session
        session.send(
            frames.Offering(
                nonce=offer.ticket.nonce,
                room=offer.ticket.room,
                num_tokens=offer.num_tokens,
                digest=offer.digest,
                start=offer.start,
                places={kind: frames.Places.of(span) for kind, span in offer.spans.items()},
                weight_version=offer.weight_version,
            )
        )

    # -- how tickets end -------------------------------------------------------------------------------------------

    def end(self, receipt: Receipt, failure: Failure) -> None:
        """Break a ticket, once; where the writer reaches in by itself, its word or its death closes it."""
        if receipt.stage not in (Stage.WAITING, Stage.OFFERED):
            return
        was, receipt.stage = receipt.stage, Stage.BROKEN
        self._loop.emit(Broken(receipt.ticket, failure))
        if was is Stage.OFFERED:
            self._send(frames.Withdrawn(receipt.ticket.nonce, failure))
        else:
            self.decline(receipt.offer, failure, receipt.since)
        if not receipt.has_writer:
            self._close(receipt)

    def _close(self, receipt: Receipt) -> None:
        receipt.stage = Stage.CLOSING
        self._chunks.submit(data_thread.Drop(receipt.ticket.nonce))

    def settle(self, receipt: Receipt) -> None:
        """Where all has come, and the sender has said that this was all: with that it writes no more."""
        if receipt.stage is Stage.OFFERED and receipt.landed is not None and receipt.tail is not None:
            receipt.stage = Stage.ARRIVED
            self._loop.emit(Arrived(receipt.ticket, receipt.tail, receipt.landed.bytes_per_s))
            self._send(frames.Settled(receipt.ticket.nonce))
            self._close(receipt)

    def _send(self, frame: frames.Withdrawn | frames.Settled) -> None:
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
                    receipt = self.receipts.get(nonce)
                    if receipt is not None and receipt.stage is Stage.OFFERED:
                        self._loop.emit(Renewed(receipt.ticket))
            case frames.Resting(asleep):
                self.rests = asleep
            case frames.Completed(nonce, tail):
                if nonce in self.receipts:
                    self._complete(self.receipts[nonce], tail)
            case frames.Withdrawn(nonce, failure):
                if nonce in self.receipts:
                    self.end(self.receipts[nonce], failure)
            case frames.Fenced(nonce):
                receipt = self.receipts.get(nonce)
                if receipt is not None and receipt.stage is Stage.BROKEN and _is_of(receipt, session):
                    self._close(receipt)  # a successor on the same port cannot speak for it

    def _complete(self, receipt: Receipt, tail: Tail) -> None:
        if tail.num_tokens != receipt.offer.num_tokens:
            error = OfferError(f"prefill sent {tail.num_tokens} tokens of {receipt.offer.num_tokens}")
            self.end(receipt, Failure.of(error))
            return
        receipt.tail = tail
        self.settle(receipt)

    def on_joined(self, session: SessionWithPrefill) -> None:
        log.info(event("prefill_joined", where=session.where, shared=session.reach is not None))
        self._say_unsaid(session)
        for receipt in [*self.receipts.values()]:
            if receipt.stage is Stage.WAITING:
                self._make(receipt, session)
            elif receipt.stage is Stage.BROKEN:  # in an earlier session: is anybody still writing?
                self._send(frames.Withdrawn(receipt.ticket.nonce, frames.peer_lost(session.where, "it was anew")))

    def on_session_refused(self, session: SessionWithPrefill, failure: Failure) -> None:
        for receipt in [*self.receipts.values()]:
            self.end(receipt, failure)
        self._say_unsaid(session)

    def _say_unsaid(self, session: SessionWithPrefill) -> None:
        for _, frame in self.unsaid:
            session.send(frame)
        self.unsaid.clear()

    def on_session_lost(self, session: SessionWithPrefill, failure: Failure) -> None:
        """Break the tickets that were offered in the session; those that wait for a session may use the next one."""
        self.session, self.rests = None, False
        self._retry_at = self._loop.clock() + self._engine.options.heartbeat_s / RETRIES_PER_BEAT
        for receipt in [*self.receipts.values()]:
            if receipt.stage is Stage.OFFERED:
                self.end(receipt, failure)
        self.forget()

    def forget(self) -> None:
        """Leave `peers` if nothing is left to do with this server."""
        if not (self.receipts or self.unsaid) and self.session is None:
            self._peers.pop(self.address, None)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        limit_s = self._engine.options.bootstrap_timeout_s
        if self.session is not None:
            self._loop.guard.run(self.session.where, partial(self.session.tick, now), self.session.lose)
        for receipt in [*self.receipts.values()]:
            if receipt.stage is Stage.WAITING and now - receipt.since > limit_s:
                self.end(receipt, frames.bootstrap_timeout(f"{self.address[0]}:{self.address[1]}", limit_s))
            elif receipt.stage is Stage.BROKEN and receipt.writer_is_dead:
                self._close(receipt)
        self.unsaid = [(since, frame) for since, frame in self.unsaid if now - since <= limit_s]
        if self.unsaid or any(receipt.stage in (Stage.WAITING, Stage.BROKEN) for receipt in self.receipts.values()):
            self._connect()
        self.forget()


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
        """Tickets that have broken and whose places somebody may still write to; for any thread."""
        return sum(receipt.stage is Stage.BROKEN for _, receipt in [*self._receipts.values()])

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
            receipt.landed = report
            peer.settle(receipt)

    def _on_dropped(self, nonce: bytes) -> None:
        peer, receipt = self._receipts.pop(nonce)
        del peer.receipts[nonce]
        self._loop.emit(Closed(receipt.ticket))
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
        for peer in [*self._peers.values()]:
            if peer.session is not None:
                peer.session.lose(frames.peer_lost(peer.session.where, why))

    def close(self) -> None:
        self.end_sessions("this engine ends")

    def tick(self) -> None:
        now = self._loop.clock()
        for peer in [*self._peers.values()]:
            peer.tick(now)

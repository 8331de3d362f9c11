"""Decode's half: offers of places to prefill servers, what has come into them, and when they are nobody's again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from forebay.base.errors import OfferError
from forebay.base.exposure import is_loopback
from forebay.base.log import event, get_logger
from forebay.requests.pieces import Chunk
from forebay.requests.transfers import Arrived, Broken, Closed, Decline, Offer, Renewed, Tail, Ticket, Withdraw
from forebay.requests.updates import Failure
from forebay.transfer.session import data_thread
from forebay.transfer.session.desk import Desk
from forebay.transfer.session.prefill_peer import Address, Session
from forebay.transfer.state.tickets import Landing
from forebay.transfer.wire import frames
from forebay.transfer.wire.memory import Reach

RETRIES_PER_BEAT: Final = 4

log = get_logger("transfer")


class Stage(Enum):
    WAITING = auto()  # for a session; nobody else knows of it
    OFFERED = auto()
    ARRIVED = auto()  # all of it: to be closed
    BROKEN = auto()  # to be closed when nobody can write any more
    CLOSING = auto()  # the mover has been told to drop it


@dataclass(slots=True)
class Receipt:
    """A ticket as decode has it. `instance` is the process that it was offered to, and `reach` what that was let into,
    where it writes by itself."""

    offer: Offer
    since: float
    stage: Stage = Stage.WAITING
    landed: data_thread.Landed | None = None
    tail: Tail | None = None
    instance: str = ""
    reach: Reach | None = None

    @property
    def ticket(self) -> Ticket:
        return self.offer.ticket


@dataclass(slots=True)
class Peer:
    """A prefill server by address, whichever process that is just now. One that `rests` refuses what it is offered."""

    address: Address
    session: Session | None = None
    rests: bool = False  # it has said so
    retry_at: float = 0.0
    receipts: dict[bytes, Receipt] = field(default_factory=dict)
    unsaid: list[tuple[float, frames.Declined]] = field(default_factory=list)  # since when they wait for a session

    def send(self, frame: frames.Offering | frames.Declined | frames.Withdrawn | frames.Settled) -> None:
        if self.session is not None:
            self.session.send(frame)

    def say_what_is_unsaid(self) -> None:
        for _, frame in self.unsaid:
            self.send(frame)
        self.unsaid.clear()


class DecodeStage:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._peers: dict[Address, Peer] = {}
        self._receipts: dict[bytes, tuple[Peer, Receipt]] = {}
        self._epoch = 0

    @property
    def num_unfenced(self) -> int:
        """Tickets that have broken and whose places somebody may still write to."""
        return sum(receipt.stage is Stage.BROKEN for _, receipt in [*self._receipts.values()])

    def transport(self, address: Address) -> str:
        """Return the transport of the session with the prefill server there, "" without one; for any thread."""
        peer = self._peers.get(address)
        return peer.session.transport if peer is not None and peer.session is not None else ""

    # -- orders ----------------------------------------------------------------------------------------------------

    def offer(self, offer: Offer) -> None:
        peer = self._peer_of(offer)
        receipt, nonce = Receipt(offer, self._desk.clock()), offer.ticket.nonce
        assert nonce not in self._receipts, f"the ticket of room {offer.ticket.room} has been offered before"
        self._receipts[nonce] = peer, receipt
        peer.receipts[nonce] = receipt
        if not self._may_ask(offer.host):
            self._break(peer, receipt, frames.key_required(offer.host))
            return
        if peer.rests:
            self._break(peer, receipt, frames.peer_asleep(f"{offer.host}:{offer.port}"))
            return
        try:
            landing = Landing(self._desk.shapes, offer.spans, offer.num_tokens)
        except OfferError as error:
            self._break(peer, receipt, Failure.of(error))
            return
        self._desk.data_thread.submit(data_thread.Expect(nonce, landing))
        if peer.session is not None and peer.session.is_joined:
            self._make(peer, receipt, peer.session)
        else:
            self._connect(peer)

    def decline(self, order: Decline) -> None:
        self._decline(self._peer_of(order), order, order.failure, self._desk.clock())

    def _peer_of(self, order: Offer | Decline) -> Peer:
        return self._peers.setdefault((order.host, order.port), Peer((order.host, order.port)))

    def _may_ask(self, host: str) -> bool:
        return bool(self._desk.options.cluster_key) or is_loopback(host)

    def withdraw(self, order: Withdraw) -> None:
        found = self._receipts.get(order.ticket.nonce)
        if found is not None:
            self._break(*found, order.failure)

    def _make(self, peer: Peer, receipt: Receipt, session: Session) -> None:
        """The offer goes out: from here on it is not ours alone to close."""
        offer = receipt.offer
        receipt.stage, receipt.instance, receipt.reach = Stage.OFFERED, session.instance, session.reach
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

    def _break(self, peer: Peer, receipt: Receipt, failure: Failure) -> None:
        """Once; where the writer reaches in by itself, its word or its death closes it."""
        if receipt.stage not in (Stage.WAITING, Stage.OFFERED):
            return
        was, receipt.stage = receipt.stage, Stage.BROKEN
        self._desk.emit(Broken(receipt.ticket, failure))
        if was is Stage.OFFERED:
            peer.send(frames.Withdrawn(receipt.ticket.nonce, failure))
        else:
            self._decline(peer, receipt.offer, failure, receipt.since)
        if receipt.reach is None:
            self._close(receipt)

    def _decline(self, peer: Peer, half: Offer | Decline, failure: Failure, since: float) -> None:
        """Prefill would wait for it until that took too long. Said in the next session, where there is none."""
        if not self._may_ask(half.host):
            return
        frame = frames.Declined(half.ticket.nonce, half.ticket.room, half.num_tokens, half.digest, failure)
        if peer.session is not None and peer.session.is_joined:
            peer.send(frame)
        else:
            peer.unsaid.append((since, frame))

    def _close(self, receipt: Receipt) -> None:
        receipt.stage = Stage.CLOSING
        self._desk.data_thread.submit(data_thread.Drop(receipt.ticket.nonce))

    def _settle(self, peer: Peer, receipt: Receipt) -> None:
        """Where all has come, and the sender has said that this was all: with that it writes no more."""
        if receipt.stage is Stage.OFFERED and receipt.landed is not None and receipt.tail is not None:
            receipt.stage = Stage.ARRIVED
            self._desk.emit(Arrived(receipt.ticket, receipt.tail, receipt.landed.bytes_per_s))
            peer.send(frames.Settled(receipt.ticket.nonce))
            self._close(receipt)

    def on_landed(self, report: data_thread.Landed) -> None:
        found = self._receipts.get(report.nonce)
        if found is not None:
            found[1].landed = report
            self._settle(*found)

    def on_failed(self, report: data_thread.Failed) -> None:
        found = self._receipts.get(report.nonce)
        if found is not None:
            self._break(*found, report.failure)

    def on_dropped(self, report: data_thread.Dropped) -> None:
        peer, receipt = self._receipts.pop(report.nonce)
        del peer.receipts[report.nonce]
        self._desk.emit(Closed(receipt.ticket))
        self._forget(peer)

    def on_mover_lost(self, report: data_thread.Lost) -> None:
        for peer in [*self._peers.values()]:
            if peer.session is not None and peer.session.epoch == report.session:
                peer.session.lose(frames.peer_lost(peer.session.where, report.why))

    # -- what prefill says -----------------------------------------------------------------------------------------

    def on_session_frame(self, session: Session, frame: object) -> None:
        peer = self._peers[session.address]
        match frame:
            case Chunk():
                self._desk.data_thread.submit(data_thread.Check(session.epoch, frame))
            case frames.Beat(held):
                for nonce in held:
                    receipt = peer.receipts.get(nonce)
                    if receipt is not None and receipt.stage is Stage.OFFERED:
                        self._desk.emit(Renewed(receipt.ticket))
            case frames.Resting(asleep):
                peer.rests = asleep
            case frames.Completed(nonce, tail):
                if nonce in peer.receipts:
                    self._complete(peer, peer.receipts[nonce], tail)
            case frames.Withdrawn(nonce, failure):
                if nonce in peer.receipts:
                    self._break(peer, peer.receipts[nonce], failure)
            case frames.Fenced(nonce):
                receipt = peer.receipts.get(nonce)
                if receipt is not None and receipt.stage is Stage.BROKEN and receipt.instance == session.instance:
                    self._close(receipt)  # a successor on the same port cannot speak for it

    def _complete(self, peer: Peer, receipt: Receipt, tail: Tail) -> None:
        if tail.num_tokens != receipt.offer.num_tokens:
            error = OfferError(f"prefill sent {tail.num_tokens} tokens of {receipt.offer.num_tokens}")
            self._break(peer, receipt, Failure.of(error))
            return
        receipt.tail = tail
        self._settle(peer, receipt)

    # -- sessions --------------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> None:
        if peer.session is None and self._desk.clock() >= peer.retry_at:
            self._epoch += 1
            peer.session = Session(self._desk, peer.address, self._epoch, self)

    def on_joined(self, session: Session) -> None:
        peer = self._peers[session.address]
        log.info(event("prefill_joined", where=session.where, shared=session.reach is not None))
        peer.say_what_is_unsaid()
        for receipt in [*peer.receipts.values()]:
            if receipt.stage is Stage.WAITING:
                self._make(peer, receipt, session)
            elif receipt.stage is Stage.BROKEN:  # in an earlier session: is anybody still writing?
                peer.send(frames.Withdrawn(receipt.ticket.nonce, frames.peer_lost(session.where, "it was anew")))

    def on_session_refused(self, session: Session, failure: Failure) -> None:
        peer = self._peers[session.address]
        for receipt in [*peer.receipts.values()]:
            self._break(peer, receipt, failure)
        peer.say_what_is_unsaid()

    def on_session_lost(self, session: Session, failure: Failure) -> None:
        """Break the tickets that were offered in the session; those that wait for a session may use the next one."""
        peer = self._peers[session.address]
        peer.session, peer.rests = None, False
        peer.retry_at = self._desk.clock() + self._desk.options.heartbeat_s / RETRIES_PER_BEAT
        for receipt in [*peer.receipts.values()]:
            if receipt.stage is Stage.OFFERED:
                self._break(peer, receipt, failure)
        self._forget(peer)

    def lose_ticket(self, nonce: bytes, failure: Failure) -> None:
        """End the session of a ticket whose order or report could not be handled."""
        found = self._receipts.get(nonce)
        if found is not None:
            peer, receipt = found
            if peer.session is not None:
                peer.session.lose(failure)
            self._break(peer, receipt, failure)

    def _forget(self, peer: Peer) -> None:
        if not (peer.receipts or peer.unsaid) and peer.session is None:
            self._peers.pop(peer.address, None)

    def end_sessions(self, why: str) -> None:
        for peer in [*self._peers.values()]:
            if peer.session is not None:
                peer.session.lose(frames.peer_lost(peer.session.where, why))

    def close(self) -> None:
        self.end_sessions("this engine ends")

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now, limit_s = self._desk.clock(), self._desk.options.bootstrap_timeout_s
        for peer in [*self._peers.values()]:
            if peer.session is not None:
                self._desk.guard.run(peer.session.where, partial(peer.session.tick, now), peer.session.lose)
            for receipt in [*peer.receipts.values()]:
                self._tick_receipt(peer, receipt, now)
            peer.unsaid = [(since, frame) for since, frame in peer.unsaid if now - since <= limit_s]
            if peer.unsaid or any(receipt.stage in (Stage.WAITING, Stage.BROKEN) for receipt in peer.receipts.values()):
                self._connect(peer)
            self._forget(peer)

    def _tick_receipt(self, peer: Peer, receipt: Receipt, now: float) -> None:
        limit_s = self._desk.options.bootstrap_timeout_s
        if receipt.stage is Stage.WAITING and now - receipt.since > limit_s:
            self._break(peer, receipt, frames.bootstrap_timeout(f"{peer.address[0]}:{peer.address[1]}", limit_s))
        elif receipt.stage is Stage.BROKEN and receipt.reach is not None and receipt.reach.writer_is_dead():
            self._close(receipt)

"""The thread that moves bytes: it gathers, writes, receives, checks and scatters chunks, and never decides.

Jobs are its input, reports its output. Bytes that still arrive for a dropped ticket are read and discarded. Prefill's
chunks are the sender's, decode's are the receiver's.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from forebay.base.errors import EngineError, OfferError, WireError
from forebay.base.log import event, get_logger
from forebay.base.parts import I64
from forebay.base.wake import Wake
from forebay.requests.pieces import Chunk, Piece
from forebay.requests.updates import Failure
from forebay.transfer.state.tickets import Arrival, Landing
from forebay.transfer.wire.memory import U8, Memory, Reader, Writer

POLL_S: Final = 0.0005  # between two looks at a writer that nothing can be waited for with

log = get_logger("transfer")


class AddWriter(NamedTuple):
    session: int
    writer: Writer


class AddReader(NamedTuple):
    session: int
    reader: Reader


class EndSession(NamedTuple):
    session: int


class Expect(NamedTuple):
    """Accept chunks of this ticket, for these places."""

    nonce: bytes
    landing: Landing


class Check(NamedTuple):
    """The peer of `session` has written this chunk here by itself."""

    session: int
    chunk: Chunk


class Write(NamedTuple):
    """To the peer of `session`; `places` are decode's, piece by piece."""

    session: int
    nonce: bytes
    pieces: Sequence[Piece]
    places: Sequence[I64]


class Drop(NamedTuple):
    """Touch nothing of this ticket any more; answered by `Dropped`."""

    nonce: bytes


Job = AddWriter | AddReader | EndSession | Expect | Check | Write | Drop


class Wrote(NamedTuple):
    session: int
    chunk: Chunk


class Landed(NamedTuple):
    """All bytes have arrived; and the rate, of all chunks after the first, whose start time is unknown."""

    nonce: bytes
    bytes_per_s: float


class Failed(NamedTuple):
    nonce: bytes
    failure: Failure


class Dropped(NamedTuple):
    nonce: bytes


class Lost(NamedTuple):
    """The session's connection of chunks has ended."""

    session: int
    why: str


Report = Wrote | Landed | Failed | Dropped | Lost


@dataclass(slots=True)
class Outbox:
    """The chunks for one peer: those that wait, and the ticket of the one that is on its way."""

    writer: Writer
    waiting: deque[tuple[bytes, Piece, I64]] = field(default_factory=deque)
    current: bytes | None = None


class Sender:
    """Writes chunks to peers, one at a time to each. Every method runs on the data thread."""

    def __init__(self, selector: selectors.BaseSelector, report: Callable[[Report], None]) -> None:
        self._selector, self._report = selector, report
        self.outboxes: dict[int, Outbox] = {}
        self.ending: list[Outbox] = []
        self.dropping: set[bytes] = set()  # whose chunk is on its way from or to places
        self._lost: set[bytes] = set()  # whose places may be touched, for ever

    def add(self, session: int, writer: Writer) -> None:
        self.outboxes[session] = Outbox(writer)

    def put(self, job: Write) -> None:
        """Add chunks to those that wait, unless the session is over."""
        if job.session in self.outboxes:
            self.outboxes[job.session].waiting.extend(
                (job.nonce, piece, there) for piece, there in zip(job.pieces, job.places, strict=True)
            )

    @property
    def polls(self) -> bool:
        """Whether a chunk is on its way for whose end nothing can be waited."""
        return any(box.current is not None and box.writer.fileno() < 0 for box in self._boxes)

    @property
    def _boxes(self) -> list[Outbox]:
        return [*self.outboxes.values(), *self.ending]

    def write(self, session: int) -> bool:
        """Write one chunk to the session's peer, if it takes one; whether one has left."""
        box = self.outboxes[session]
        if box.current is None and box.waiting:
            nonce, piece, places = box.waiting.popleft()
            box.current = nonce
            box.writer.begin(nonce, piece, places)
        if box.current is None:
            return False
        chunk = box.writer.advance()
        self._watch(box, writing=chunk is None)
        if chunk is None:
            return False
        self._report(Wrote(session, chunk))
        self._forget_chunk(box)
        return True

    def end_what_is_over(self) -> None:
        """Close the writers of lost sessions whose last chunk is over: only then nothing of it is touched."""
        self.ending = [box for box in self.ending if not self._has_ended(box)]

    def _has_ended(self, box: Outbox) -> bool:
        try:
            if box.writer.advance() is None:
                return False
        except Exception as error:
            log.info(event("transfer_connection_ended", why=repr(error)))
        box.writer.close()
        self._forget_chunk(box)
        return True

    def _forget_chunk(self, box: Outbox) -> None:
        """Forget the chunk under way, whose writer touches no places any more."""
        nonce, box.current = box.current, None
        if nonce is not None and box.writer.is_lost:
            self._lost.add(nonce)
        elif nonce in self.dropping:
            self.dropping.discard(nonce)
            self._report(Dropped(nonce))

    def _watch(self, box: Outbox, *, writing: bool) -> None:
        fd = box.writer.fileno()
        if fd < 0 or writing == (fd in self._selector.get_map()):
            return
        if writing:
            self._selector.register(fd, selectors.EVENT_WRITE)
        else:
            self._selector.unregister(fd)

    def drop(self, nonce: bytes) -> None:
        """Report `Dropped` when no writer touches places of the ticket any more."""
        for box in self.outboxes.values():
            box.waiting = deque(item for item in box.waiting if item[0] != nonce)
        if nonce in self._lost:
            return  # never
        if any(box.current == nonce and box.writer.holds_places for box in self._boxes):
            self.dropping.add(nonce)
        else:
            self._report(Dropped(nonce))

    def end(self, session: int) -> None:
        box = self.outboxes.pop(session, None)
        if box is None:
            return
        writer = box.writer
        ends_at_once = writer.closes_at_once or writer.is_lost or not writer.holds_places
        if box.current is not None and not ends_at_once:
            self.ending.append(box)
        else:
            _close(writer, self._selector)
            self._forget_chunk(box)


class Receiver:
    """Reads chunks, checks them and copies them to their places. Every method runs on the data thread."""

    def __init__(
        self, memory: Memory, num_bytes: int, selector: selectors.BaseSelector, report: Callable[[Report], None]
    ) -> None:
        self._memory, self._selector, self._report = memory, selector, report
        self._staging = memory.staging(num_bytes)
        self.readers: dict[int, Reader] = {}
        self.arrivals: dict[bytes, Arrival] = {}

    def add(self, session: int, reader: Reader) -> None:
        self.readers[session] = reader
        self._selector.register(reader, selectors.EVENT_READ, session)

    def expect(self, nonce: bytes, landing: Landing) -> None:
        self.arrivals[nonce] = Arrival(landing)
        if landing.is_complete:
            self._report(Landed(nonce, 0.0))

    def read(self, session: int) -> None:
        found = self.readers[session].advance(self.target)
        if found is not None:
            self._land(*found)

    def target(self, chunk: Chunk) -> list[memoryview]:
        """Return the final location of a chunk that begins to arrive; None if it is not certain yet, or in short
        runs."""
        piece = self._due(chunk)
        if piece is None or self._memory.num_bytes(piece) != chunk.num_bytes:
            return []
        return self._memory.parts(piece)

    def _land(self, chunk: Chunk, checksum: int, data: U8 | None) -> None:
        """Check a chunk and copy it to the places of its ticket, unless it is there already."""
        piece = self._due(chunk)
        if piece is not None and self._is_whole(chunk, piece, checksum):
            if data is not None:
                self._memory.scatter(piece, data)
            self._landed(chunk, piece)

    def check(self, chunk: Chunk) -> None:
        """Check a chunk that the peer has written to its places by itself."""
        piece = self._due(chunk)
        if piece is not None and self._is_whole(chunk, piece, self._memory.sum(piece, self._staging)):
            self._landed(chunk, piece)

    def _due(self, chunk: Chunk) -> Piece | None:
        """Return the places of the chunk; None if its ticket was dropped, or if another chunk was due."""
        arrival = self.arrivals.get(chunk.nonce)
        if arrival is None:
            return None
        try:
            return arrival.landing.piece(chunk.kind, chunk.region, chunk.num_regions, chunk.first, chunk.end)
        except OfferError as error:
            self._report(Failed(chunk.nonce, Failure.of(error)))
            return None

    def _is_whole(self, chunk: Chunk, piece: Piece, checksum: int) -> bool:
        if chunk.num_bytes == self._memory.num_bytes(piece) and checksum == chunk.checksum:
            return True
        error = f"{chunk.kind} {chunk.first}..{chunk.end} has another checksum than what was sent"
        self._report(Failed(chunk.nonce, Failure.of(EngineError(error, code="checksum_mismatch"))))
        return False

    def _landed(self, chunk: Chunk, piece: Piece) -> None:
        arrival, now = self.arrivals[chunk.nonce], time.monotonic()
        arrival.landing.landed(piece)
        arrival.add(chunk.num_bytes, now)
        if arrival.landing.is_complete:
            self._report(Landed(chunk.nonce, arrival.bytes_per_s(now)))

    def drop(self, nonce: bytes) -> None:
        """Discard what still comes of the ticket."""
        self.arrivals.pop(nonce, None)
        for reader in self.readers.values():
            reader.divert(nonce)

    def end(self, session: int) -> None:
        reader = self.readers.pop(session, None)
        if reader is not None:
            _close(reader, self._selector)


class DataThread:
    """Owns the thread, the sender and the receiver. `submit` from any thread; `report` is called by the data thread."""

    def __init__(self, memory: Memory, num_bytes: int, report: Callable[[Report], None]) -> None:
        self._report = report
        self._jobs: deque[Job] = deque()
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self.sender = Sender(self._selector, report)
        self.receiver = Receiver(memory, num_bytes, self._selector, report)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Add a job; from any thread."""
        self._jobs.append(job)
        self._wake.set()

    def close(self) -> None:
        self._ending = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
        except Exception:
            log.exception(event("transfers_ended"))
        finally:
            for session in [*self.sender.outboxes, *self.receiver.readers]:
                self._end(session)
            self._selector.close()

    def _turn(self) -> None:
        self.sender.end_what_is_over()
        sessions = [*self.sender.outboxes]
        moved = [self._guarded(session, partial(self.sender.write, session)) for session in sessions]
        ready = self._selector.select(0 if any(moved) else POLL_S if self.sender.polls else None)
        self._wake.clear()
        while self._jobs:  # first: what has come may be of a ticket that is among them
            job = self._jobs.popleft()
            if isinstance(job, Expect | Drop):
                self._do(job)
            else:
                self._guarded(job.session, partial(self._do, job))
        for key, _ in ready:
            if key.data in self.receiver.readers:
                self._guarded(key.data, partial(self.receiver.read, key.data))

    def _guarded(self, session: int, work: Callable[[], object]) -> object:
        """Run `work`, which the session's peer caused. If it raises, the session ends and nothing else (C33)."""
        try:
            return work()
        except Exception as error:
            if not isinstance(error, OSError | WireError):
                log.error(event("peer_failed", session=session, why=repr(error)), exc_info=error)
            why = str(error) or type(error).__name__
            log.info(event("transfer_connection_ended", why=why))
            self._end(session)
            self._report(Lost(session, why))
            return None

    def _do(self, job: Job) -> None:
        match job:
            case AddWriter(session, writer):
                self.sender.add(session, writer)
            case AddReader(session, reader):
                self.receiver.add(session, reader)
            case EndSession(session):
                self._end(session)
            case Expect(nonce, landing):
                self.receiver.expect(nonce, landing)
            case Check(_, chunk):
                self.receiver.check(chunk)
            case Write():
                self.sender.put(job)
            case Drop(nonce):
                self.receiver.drop(nonce)
                self.sender.drop(nonce)

    def _end(self, session: int) -> None:
        self.sender.end(session)
        self.receiver.end(session)


def _close(end: Writer | Reader, selector: selectors.BaseSelector) -> None:
    if end.fileno() >= 0 and end.fileno() in selector.get_map():
        selector.unregister(end.fileno())
    end.close()

"""The thread that moves bytes: it gathers, writes, receives, checks and scatters chunks, and never decides.

What it is to do comes as jobs, what it did goes back as reports. A ticket that was dropped is none: what still comes
for it is read and thrown away.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeVar

from forebay.base.errors import OfferError, WireError
from forebay.base.log import event, get_logger
from forebay.base.parts import I64
from forebay.base.wake import Wake
from forebay.requests.pieces import Chunk, Piece
from forebay.requests.updates import Failure
from forebay.transfer.state.tickets import Landing
from forebay.transfer.wire import frames
from forebay.transfer.wire.memory import U8, Memory, Writer
from forebay.transfer.wire.tcp import TcpReader

T = TypeVar("T")

POLL_S: Final = 0.0005  # between two looks at a writer that nothing can be waited for with

log = get_logger("transfer")


class AddWriter(NamedTuple):
    session: int
    writer: Writer


class AddReader(NamedTuple):
    session: int
    reader: TcpReader


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
    """All that was due has arrived; how fast, of all chunks behind the first, whose begin nobody knows."""

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
class _Outbox:
    writer: Writer
    waiting: deque[tuple[bytes, Piece, I64]] = field(default_factory=deque)
    current: bytes | None = None  # the ticket of the chunk that is on its way


@dataclass(slots=True)
class _Arrival:
    """Progress of a ticket that is arriving: bytes since the end of its first chunk."""

    landing: Landing
    since: float = 0.0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        if self.since:
            self.num_bytes += num_bytes
        else:
            self.since = time.monotonic()

    @property
    def bytes_per_s(self) -> float:
        """0 if there was one chunk, or if the clock did not advance between the first and the last."""
        seconds = time.monotonic() - self.since
        return self.num_bytes / seconds if self.num_bytes and seconds > 0 else 0.0


class DataThread:
    """`submit` from any thread; `report` is called by the mover's own."""

    def __init__(self, memory: Memory, num_bytes: int, report: Callable[[Report], None]) -> None:
        self._memory, self._report = memory, report
        self._staging = memory.staging(num_bytes)
        self._jobs: deque[Job] = deque()
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._outboxes: dict[int, _Outbox] = {}
        self._readers: dict[int, TcpReader] = {}
        self._arrivals: dict[bytes, _Arrival] = {}
        self._ending_boxes: list[_Outbox] = []
        self._dropping: set[bytes] = set()  # whose chunk is on its way from or to places
        self._lost: set[bytes] = set()  # whose places may be touched, for ever
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
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
            for session in [*self._outboxes, *self._readers]:
                self._end(session)
            self._selector.close()

    def _turn(self) -> None:
        moved = self._write_some()
        boxes = (*self._outboxes.values(), *self._ending_boxes)
        polls = any(box.current is not None and box.writer.fileno() < 0 for box in boxes)
        ready = self._selector.select(0 if moved else POLL_S if polls else None)
        self._wake.clear()
        while self._jobs:  # first: what has come may be of a ticket that is among them
            job = self._jobs.popleft()
            if isinstance(job, Expect | Drop):
                self._do(job)
            else:
                self._guarded(job.session, partial(self._do, job))
        for key, _ in ready:
            if key.data in self._readers:
                self._guarded(key.data, partial(self._read, key.data))

    def _guarded(self, session: int, work: Callable[[], T]) -> T | None:
        """Run `work`, which the session's peer caused. If it raises, the session ends and nothing else (C33)."""
        try:
            return work()
        except Exception as error:
            if not isinstance(error, OSError | WireError):
                log.error(event("peer_failed", session=session, why=repr(error)), exc_info=error)
            self._lose(session, str(error) or type(error).__name__)
            return None

    def _do(self, job: Job) -> None:
        match job:
            case AddWriter(session, writer):
                self._outboxes[session] = _Outbox(writer)
            case AddReader(session, reader):
                self._readers[session] = reader
                self._selector.register(reader, selectors.EVENT_READ, session)
            case EndSession(session):
                self._end(session)
            case Expect(nonce, landing):
                self._arrivals[nonce] = _Arrival(landing)
                if landing.is_complete:
                    self._report(Landed(nonce, 0.0))
            case Check(_, chunk):
                self._check(chunk)
            case Write(session, nonce, pieces, places):
                if session in self._outboxes:
                    self._outboxes[session].waiting.extend(
                        (nonce, piece, there) for piece, there in zip(pieces, places, strict=True)
                    )
            case Drop(nonce):
                self._drop(nonce)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _write_some(self) -> bool:
        """A chunk for each peer that takes one; whether any was."""
        moved = False
        self._ending_boxes = [box for box in self._ending_boxes if not self._has_ended(box)]
        for session, box in [*self._outboxes.items()]:
            moved |= bool(self._guarded(session, partial(self._write, session, box)))
        return moved

    def _write(self, session: int, box: _Outbox) -> bool:
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
        self._let_go(box)
        return True

    def _has_ended(self, box: _Outbox) -> bool:
        """Whether what a writer was at when its session was lost is over: only then nothing of it is touched."""
        try:
            if box.writer.advance() is None:
                return False
        except Exception as error:
            log.info(event("transfer_connection_ended", why=repr(error)))
        box.writer.close()
        self._let_go(box)
        return True

    def _let_go(self, box: _Outbox) -> None:
        """Forget the chunk under way, whose writer touches no places any more."""
        nonce, box.current = box.current, None
        if nonce is not None and box.writer.is_lost:
            self._lost.add(nonce)
        elif nonce in self._dropping:
            self._dropping.discard(nonce)
            self._report(Dropped(nonce))

    def _watch(self, box: _Outbox, *, writing: bool) -> None:
        fd = box.writer.fileno()
        if fd < 0 or writing == (fd in self._selector.get_map()):
            return
        if writing:
            self._selector.register(fd, selectors.EVENT_WRITE)
        else:
            self._selector.unregister(fd)

    def _drop(self, nonce: bytes) -> None:
        self._arrivals.pop(nonce, None)
        for reader in self._readers.values():
            reader.divert(nonce)
        for box in self._outboxes.values():
            box.waiting = deque(item for item in box.waiting if item[0] != nonce)
        if nonce in self._lost:
            return  # never
        boxes = (*self._outboxes.values(), *self._ending_boxes)
        if any(box.current == nonce and box.writer.holds_places for box in boxes):
            self._dropping.add(nonce)
        else:
            self._report(Dropped(nonce))

    # -- decode ----------------------------------------------------------------------------------------------------

    def _read(self, session: int) -> None:
        found = self._readers[session].advance(self._target)
        if found is not None:
            self._land(*found)

    def _target(self, chunk: Chunk) -> list[memoryview]:
        """Where a chunk that begins to come lies at its end; nowhere where that is not certain, or in short runs."""
        arrival = self._arrivals.get(chunk.nonce)
        piece = None if arrival is None else self._piece(arrival, chunk)
        if piece is None or self._memory.num_bytes(piece) != chunk.num_bytes:
            return []
        return self._memory.parts(piece)

    def _land(self, chunk: Chunk, checksum: int, data: U8 | None) -> None:
        """Check a chunk and copy it to the places of its ticket, unless it lies there already."""
        arrival = self._arrivals.get(chunk.nonce)
        if arrival is None:
            return
        piece = self._piece(arrival, chunk)
        if piece is not None and self._is_whole(chunk, piece, chunk.num_bytes, checksum):
            if data is not None:
                self._memory.scatter(piece, data)
            self._landed(chunk, arrival, piece)

    def _check(self, chunk: Chunk) -> None:
        arrival = self._arrivals.get(chunk.nonce)
        if arrival is None:
            return
        piece = self._piece(arrival, chunk)
        if piece is not None and self._is_whole(chunk, piece, chunk.num_bytes, self._memory.sum(piece, self._staging)):
            self._landed(chunk, arrival, piece)

    def _piece(self, arrival: _Arrival, chunk: Chunk) -> Piece | None:
        try:
            return arrival.landing.piece(chunk.kind, chunk.region, chunk.num_regions, chunk.first, chunk.end)
        except OfferError as error:
            self._fail(chunk.nonce, Failure.of(error))
            return None

    def _is_whole(self, chunk: Chunk, piece: Piece, num_bytes: int, checksum: int) -> bool:
        if num_bytes == self._memory.num_bytes(piece) and checksum == chunk.checksum:
            return True
        self._fail(chunk.nonce, frames.altered(chunk.kind, chunk.first, chunk.end))
        return False

    def _landed(self, chunk: Chunk, arrival: _Arrival, piece: Piece) -> None:
        arrival.landing.landed(piece)
        arrival.add(chunk.num_bytes)
        if arrival.landing.is_complete:
            self._report(Landed(chunk.nonce, arrival.bytes_per_s))

    def _fail(self, nonce: bytes, failure: Failure) -> None:
        self._report(Failed(nonce, failure))

    # -- ends ------------------------------------------------------------------------------------------------------

    def _lose(self, session: int, why: str) -> None:
        log.info(event("transfer_connection_ended", why=why))
        self._end(session)
        self._report(Lost(session, why))

    def _end(self, session: int) -> None:
        box = self._outboxes.pop(session, None)
        reader = self._readers.pop(session, None)
        if box is not None and box.current is not None and not _ends_at_once(box.writer):
            self._ending_boxes.append(box)
            box = None
        for end in (None if box is None else box.writer, reader):
            if end is not None:
                if end.fileno() >= 0 and end.fileno() in self._selector.get_map():
                    self._selector.unregister(end.fileno())
                end.close()
        if box is not None:
            self._let_go(box)


def _ends_at_once(writer: Writer) -> bool:
    return writer.closes_at_once or writer.is_lost or not writer.holds_places

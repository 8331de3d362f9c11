"""The log's way from rank 0 to the other ranks: a ring in shared memory, and two pipes for each rank.

Rank 0 writes a record once, into the ring, and its place into the first pipe of each rank, which wakes the rank. Each
rank writes the outcome of each entry into its second pipe: it is also how rank 0 learns that the room of a record is
free again. The pipes order the accesses to the memory, and end with their processes. Nothing spins, and nothing is
pickled.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn

import msgspec

from forebay.base.errors import EngineError
from forebay.engine.ranks.outcome import DONE, Outcome, RankLost

RING_BYTES: Final = 16 << 20  # the largest plan has the pixels of a tile, 2.4 MB of 896 x 896
MAX_ENTRIES: Final = 1024  # under way; their places fit into a pipe of 64 KiB
_PLACE: Final = struct.Struct("<QI")  # position of a record, counted from the first byte ever written, and its length
_OUTCOME: Final = struct.Struct("<QI")  # number of an entry, and the length of its outcome: 0 for DONE
_READ_BYTES: Final = 1 << 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Outcome).decode


class RecordTooLarge(EngineError):
    """A record that is longer than the ring."""

    default_code = "plan_too_large"


class UnderWay(NamedTuple):
    """An entry without the outcomes of all ranks: the end of its record in the ring, and when it was sent. Without
    `limited` it may take any time."""

    end: int
    sent_at: float
    limited: bool


class RingReader:
    """One rank's end. Owns its descriptors: `places` to read from, `outcomes` to write to."""

    def __init__(self, memory: mmap.mmap, places: int, outcomes: int) -> None:
        self._memory, self._places, self._outcomes = memory, places, outcomes
        self._poll = select.poll()
        self._poll.register(places, select.POLLIN)

    @property
    def is_ready(self) -> bool:
        """Whether a record has arrived, or rank 0 has ended."""
        return bool(self._poll.poll(0))

    def read(self) -> bytes | None:
        """Wait for the next record and return it; None if rank 0 has ended."""
        place = os.read(self._places, _PLACE.size)  # a pipe splits no write of this length
        if not place:
            return None
        position, length = _PLACE.unpack(place)
        at = position % len(self._memory)
        record = self._memory[at : at + length]
        return record if len(record) == length else record + self._memory[: length - len(record)]

    def done(self, number: int, outcome: Outcome) -> None:
        """Send the outcome of an entry. Raises BrokenPipeError if rank 0 has ended."""
        body = b"" if outcome == DONE else _encode(outcome)
        data = memoryview(_OUTCOME.pack(number, len(body)) + body)
        while data:
            data = data[os.write(self._outcomes, data) :]


class _Incoming:
    """The outcomes of one rank, as they arrive."""

    def __init__(self, fd: int) -> None:
        self.fd, self.next = fd, 0  # the number of the next entry whose outcome arrives
        self._bytes = b""

    def read(self) -> list[Outcome]:
        """Return the outcomes that have arrived, at least a part of one. Raises EOFError if the rank has ended."""
        data = os.read(self.fd, _READ_BYTES)
        if not data:
            raise EOFError
        self._bytes += data
        found, at = [], 0
        while len(self._bytes) - at >= _OUTCOME.size:
            number, length = _OUTCOME.unpack_from(self._bytes, at)
            body = self._bytes[at + _OUTCOME.size : at + _OUTCOME.size + length]
            if len(body) < length:
                break
            if number != self.next:
                raise RankLost(f"the outcome of log entry {number} arrived, that of entry {self.next} was expected")
            found.append(_decode(body) if body else DONE)
            self.next, at = self.next + 1, at + _OUTCOME.size + length
        self._bytes = self._bytes[at:]
        return found


class RingWriter:
    """Rank 0's end, an implementation of `Ranks`. `places` are written to and `outcomes` read from, one of each for
    each rank, in their order; the caller closes them. `on_lost` ends the process. `ended` returns the error for the
    number of a rank that has ended.

    Two threads may call it: one that sends, and one that awaits outcomes. `watch` is for a third one.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        places: Sequence[int],
        outcomes: Sequence[int],
        *,
        on_lost: Callable[[EngineError], NoReturn],
        ended: Callable[[int], EngineError] = lambda rank: RankLost(f"rank {rank} has ended"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._places = memory, places
        self._ranks = list(outcomes)
        self._poll = select.poll()
        for fd in outcomes:
            self._poll.register(fd, select.POLLIN)
        self._incoming = [_Incoming(fd) for fd in outcomes]
        self._on_lost, self._ended, self._clock = on_lost, ended, clock
        self._reading = threading.Lock()  # of outcomes and their poll, from a check to the wait for more
        self._lock = threading.Lock()  # of all below
        self._written = self._freed = self._num_sent = 0
        self._under_way: deque[UnderWay] = deque()
        self._arrived: list[deque[tuple[int, Outcome]]] = [deque() for _ in outcomes]

    def send(self, record: bytes, *, limited: bool = True) -> None:
        """Append a record; waits while the slowest rank leaves no room. Raises RecordTooLarge, with nothing sent."""
        size, capacity = len(record), len(self._memory)
        if size > capacity:
            raise RecordTooLarge(f"a plan of {size} bytes for other ranks, at most {capacity}: use shorter prompts")
        with self._reading:
            while self._full(size):
                self._take(None)
        at = self._written % capacity
        here = min(size, capacity - at)
        self._memory[at : at + here] = record[:here]
        if here < size:
            self._memory[: size - here] = record[here:]
        place = _PLACE.pack(self._written, size)
        with self._lock:
            self._written, self._num_sent = self._written + size, self._num_sent + 1
            self._under_way.append(UnderWay(self._written, self._clock(), limited))
        for rank, fd in enumerate(self._places, 1):
            try:
                os.write(fd, place)
            except BrokenPipeError:
                self.lost(self._ended(rank))

    def outcomes(self, number: int) -> list[Outcome]:
        """Wait for the outcomes of an entry that was sent. Those of earlier entries are dropped."""
        found = []
        for incoming, arrived in zip(self._incoming, self._arrived, strict=True):
            with self._reading:
                while incoming.next <= number:
                    self._take(None)
            while arrived[0][0] < number:
                arrived.popleft()
            found.append(arrived.popleft()[1])
        return found

    def stalled_s(self) -> float:
        """Return the seconds since the oldest entry under way was sent, 0 for none or one without a limit. For any
        thread."""
        if self._reading.acquire(blocking=False):  # else another thread takes in what arrives
            try:
                self._take(0)
            finally:
                self._reading.release()
        with self._lock:
            oldest = self._under_way[0] if self._under_way else None
            return self._clock() - oldest.sent_at if oldest is not None and oldest.limited else 0.0

    def working(self) -> list[int]:
        """Return the ranks with an entry under way that has no limit. For any thread."""
        with self._lock:
            if all(entry.limited for entry in self._under_way):
                return []
            return [rank for rank, incoming in enumerate(self._incoming, 1) if incoming.next < self._num_sent]

    def lost(self, error: EngineError) -> NoReturn:
        """End all ranks, because they cannot continue together."""
        self._on_lost(error)

    def _full(self, size: int) -> bool:
        with self._lock:
            return len(self._under_way) >= MAX_ENTRIES or self._written - self._freed + size > len(self._memory)

    def _take(self, timeout_ms: int | None) -> None:
        """Take in the outcomes that have arrived; without a time-out wait for some. The caller has `_reading`."""
        ready = self._poll.poll(timeout_ms)
        if not ready:
            return
        with self._lock:
            for fd, _ in ready:
                rank = self._ranks.index(fd)
                try:
                    first, found = self._incoming[rank].next, self._incoming[rank].read()
                except EOFError:
                    self.lost(self._ended(rank + 1))
                self._arrived[rank].extend(enumerate(found, first))
            slowest = min(incoming.next for incoming in self._incoming)
            while self._under_way and self._num_sent - len(self._under_way) < slowest:
                self._freed = self._under_way.popleft().end

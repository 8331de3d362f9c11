"""Chunks over a connection of their own: a sealed frame that says what follows, then the bytes.

Long runs of places go straight from one cache to the other, others through a buffer. The receiver alone writes into its
memory: when it stops, the ticket is closed.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec
import xxhash

from forebay.base.errors import WireError
from forebay.base.parts import I64
from forebay.requests.pieces import Chunk, Piece, chunk_of
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.framing import FrameDecoder, FrameEncoder
from forebay.transfer.wire.memory import U8, Endpoint, Memory, Place, Reader, Transport, Writer, sum_of

MAX_PARTS: Final = 64  # in one call: what it costs to name more of them is lost where the system takes less
BUFFER_BYTES: Final = 4 << 20  # of the kernel, for each direction


class TcpWriter(Writer):
    """Prefill's end: sends one chunk at a time, from the cache itself if its runs are long enough."""

    closes_at_once = True
    is_lost = False

    def __init__(self, sock: socket.socket, encoder: FrameEncoder, memory: Memory, staging: U8, faults: Faults) -> None:
        self._sock, self._encoder, self._memory, self._faults = sock, encoder, memory, faults
        self._staging = staging
        self._unsent: deque[memoryview] = deque()
        self._chunk: Chunk | None = None
        self.holds_places = False

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        parts = self._memory.parts(piece)
        self.holds_places = bool(parts)
        if not parts:
            parts = [self._memory.gather(piece, self._staging).data]
        self._chunk = chunk_of(nonce, piece, self._memory.num_bytes(piece), sum_of(parts))
        leaving = self._faults.spoil([memoryview(self._encoder.encode(self._chunk)), *parts])
        self._unsent = deque(part for message in leaving for part in message)

    def advance(self) -> Chunk | None:
        while self._unsent:
            try:
                sent = self._sock.sendmsg(islice(self._unsent, MAX_PARTS))
            except BlockingIOError:
                return None
            _take(self._unsent, sent)
        return self._chunk

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class TcpReader(Reader):
    """Decode's end: whole chunks. Holds one at a time."""

    def __init__(self, sock: socket.socket, decoder: FrameDecoder, staging: U8) -> None:
        self._sock, self._decoder = sock, decoder
        self._staging = staging
        self._chunk: Chunk | None = None
        self._unfilled: deque[memoryview] = deque()
        self._is_staged, self._sum = True, xxhash.xxh3_64()

    def advance(self, target: Callable[[Chunk], list[memoryview]]) -> tuple[Chunk, int, U8 | None] | None:
        """See `Reader`; the end of the file is an OSError too. Bytes are summed while they are in the processor's
        cache."""
        try:
            while self._chunk is None:
                missing = self._decoder.missing()
                if missing:
                    self._decoder.feed(_some(self._sock.recv(missing)))
                else:
                    self._begin(self._begun(self._decoder.take()), target)
            while self._unfilled:
                size = self._sock.recvmsg_into(islice(self._unfilled, MAX_PARTS))[0]
                if size == 0:
                    raise ConnectionResetError("end of file")
                for part in _take(self._unfilled, size):
                    self._sum.update(part)
        except BlockingIOError:
            return None
        chunk, self._chunk = self._chunk, None
        return chunk, self._sum.intdigest(), self._staging[: chunk.num_bytes] if self._is_staged else None

    def divert(self, nonce: bytes) -> None:
        """Discard the rest of a chunk of this ticket."""
        if self._chunk is not None and self._chunk.nonce == nonce and not self._is_staged:
            self._is_staged = True
            self._unfilled = deque([self._staging[: sum(map(len, self._unfilled))].data])

    def _begin(self, chunk: Chunk, target: Callable[[Chunk], list[memoryview]]) -> None:
        parts = target(chunk)
        self._chunk, self._is_staged, self._sum = chunk, not parts, xxhash.xxh3_64()
        self._unfilled = deque(parts or [self._staging[: chunk.num_bytes].data])

    def _begun(self, frame: msgspec.Struct | None) -> Chunk:
        if not isinstance(frame, Chunk) or not 0 < frame.num_bytes <= len(self._staging):
            raise WireError(f"what came is no chunk of up to {len(self._staging)} bytes")
        return frame

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def _take(parts: deque[memoryview], num_bytes: int) -> list[memoryview]:
    """Take `count` bytes from the front."""
    taken = []
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        taken.append(parts.popleft())
    if num_bytes:
        taken.append(parts[0][:num_bytes])
        parts[0] = parts[0][num_bytes:]
    return taken


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionResetError("end of file")
    return data


class _Tcp(Transport):
    def open(self, endpoint: Endpoint, place: Place | None) -> None:
        """Return None: `Connection` makes the writer and the reader of a session."""


TRANSPORT: Final = _Tcp()

"""Chunks over a connection of their own: a sealed frame that says what follows, then the bytes.

The receiver alone writes into its memory, and only what has the right checksum: when it stops, the ticket is closed.
"""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from forebay.disagg.frames import Chunk
from forebay.disagg.memory import U8, Memory, checksum
from forebay.disagg.pages import Piece
from forebay.disagg.seal import Opener, Sealer, WireError
from forebay.requests.parts import I64

BUFFER_BYTES: Final = 4 << 20  # of the kernel, for each direction


def tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


class TcpWriter:
    holds_places = False

    def __init__(self, sock: socket.socket, sealer: Sealer, memory: Memory, staging: U8) -> None:
        self._sock, self._sealer, self._memory = sock, sealer, memory
        self._staging = staging
        self._unsent: list[memoryview] = []
        self._chunk: Chunk | None = None

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        data = self._memory.gather(piece, self._staging)
        self._chunk = chunk_of(nonce, piece, len(data), checksum(data.data))
        self._unsent = [memoryview(self._sealer.seal(self._chunk)), data.data]

    def advance(self) -> Chunk | None:
        while self._unsent:
            try:
                sent = self._sock.sendmsg(self._unsent)
            except BlockingIOError:
                return None
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.pop(0))
            if sent:
                self._unsent[0] = self._unsent[0][sent:]
        return self._chunk

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class TcpReader:
    """Decode's end: whole chunks, each with its bytes. Holds one at a time."""

    def __init__(self, sock: socket.socket, opener: Opener, staging: U8) -> None:
        self._sock, self._opener = sock, opener
        self._staging = staging
        self._chunk: Chunk | None = None
        self._have = 0

    def advance(self) -> tuple[Chunk, U8] | None:
        """The next chunk when it is whole; its bytes are valid until the next call. OSError (end-of-file too) or
        WireError where no more can come."""
        try:
            while self._chunk is None:
                missing = self._opener.missing()
                if missing:
                    self._opener.feed(_some(self._sock.recv(missing)))
                else:
                    self._chunk, self._have = self._begun(self._opener.take()), 0
            data = self._staging[: self._chunk.num_bytes]
            while self._have < len(data):
                size = self._sock.recv_into(data[self._have :].data)
                if size == 0:
                    raise ConnectionResetError("end of file")
                self._have += size
        except BlockingIOError:
            return None
        chunk, self._chunk = self._chunk, None
        return chunk, data

    def _begun(self, frame: msgspec.Struct | None) -> Chunk:
        if not isinstance(frame, Chunk) or not 0 < frame.num_bytes <= len(self._staging):
            raise WireError(f"what came is no chunk of up to {len(self._staging)} bytes")
        return frame

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def chunk_of(nonce: bytes, piece: Piece, num_bytes: int, checksum: int) -> Chunk:
    return Chunk(
        nonce=nonce,
        kind=piece.kind,
        region=piece.region,
        num_regions=piece.num_regions,
        first=piece.first,
        end=piece.end,
        num_bytes=num_bytes,
        checksum=checksum,
    )


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionResetError("end of file")
    return data

"""Frames that cannot be made, repeated, reordered or altered without the key: bytes in, bytes out, no sockets.

A frame is a header, the HMAC-SHA256 of header and body, and the body. The header has the length of the body and the
session's epoch, little-endian uint32 each, and the direction's sequence number, uint64. A frame is checked before
anything in it is looked at. Frames are not encrypted, and the bytes of a chunk, which follow its frame, have a checksum
against errors alone: a link that others can read or write to belongs in a tunnel (decision 53 has the threat model).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import types
from typing import Final

import msgspec

from forebay.base.errors import WireError
from forebay.base.units import human_bytes

MAX_FRAME_BYTES: Final = 64 << 20
MAX_GREETING_BYTES: Final = 4 << 10  # of what is held for a stranger
MAX_FIRST_BYTES: Final = 4 << 20  # for whoever has sent a greeting, which may be a recorded one

_HEADER: Final = struct.Struct("<IIQ")
_MAC_BYTES: Final = hashlib.sha256().digest_size
PREFIX_BYTES: Final = _HEADER.size + _MAC_BYTES


def mac(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return the HMAC-SHA256 of the parts, one behind the other."""
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


class Keys:
    """One key for each direction of a session, and for the greetings before it. `greetings` are the nonces of both
    sides: a session whose frames were recorded has other keys than this one."""

    def __init__(self, cluster_key: bytes, *greetings: bytes) -> None:
        session = mac(cluster_key, b"forebay transfers", *greetings)
        self.to_prefill = mac(session, b"to prefill")
        self.to_decode = mac(session, b"to decode")


class FrameEncoder:
    """Frames to bytes, numbered in the order of the calls."""

    def __init__(self, key: bytes, epoch: int) -> None:
        self._key, self._epoch, self._next = key, epoch, 0
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, frame: msgspec.Struct) -> bytes:
        """Return the bytes of the next frame. Raises WireError for one over `MAX_FRAME_BYTES`."""
        body = self._encoder.encode(frame)
        if len(body) > MAX_FRAME_BYTES:
            cap = human_bytes(MAX_FRAME_BYTES)
            raise WireError(f"a {type(frame).__name__} frame of {human_bytes(len(body))} is over the cap of {cap}")
        header = _HEADER.pack(len(body), self._epoch, self._next)
        self._next += 1
        return header + mac(self._key, header, body) + body


class FrameDecoder:
    """Bytes, cut anywhere, to frames of a union of tagged structs. Holds at most one unfinished frame.

    `cap` bounds the first frame, by which the peer proves that it has the key; later ones may have `MAX_FRAME_BYTES`.
    The first fault raises WireError, and so does every later call, since the faulty bytes stay in front: after a fault
    nothing on the stream can be trusted.
    """

    def __init__(
        self, union: type[msgspec.Struct] | types.UnionType, key: bytes, epoch: int, *, cap: int = MAX_FRAME_BYTES
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(union)
        self._key, self._epoch, self._cap, self._next = key, epoch, cap, 0
        self._buffer = bytearray()

    def succeeded_by(self, other: FrameDecoder) -> FrameDecoder:
        """Return `other`, which continues with the bytes behind the last frame."""
        other.feed(self._buffer)
        self._buffer = bytearray()
        return other

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes that have come."""
        self._buffer += data

    def take(self) -> msgspec.Struct | None:
        """The next whole frame, or None where more bytes must be fed."""
        missing = self.missing()
        if missing:
            return None
        size, _, _ = _HEADER.unpack_from(self._buffer)
        with memoryview(self._buffer) as view:
            frame = self._open(view[: _HEADER.size], view[_HEADER.size : PREFIX_BYTES], view[PREFIX_BYTES:][:size])
        del self._buffer[: PREFIX_BYTES + size]
        self._next, self._cap = self._next + 1, MAX_FRAME_BYTES
        return frame

    def missing(self) -> int:
        """How many bytes at least the next frame is short of."""
        have = len(self._buffer)
        if have < PREFIX_BYTES:
            return PREFIX_BYTES - have
        size, epoch, sequence = map(int, _HEADER.unpack_from(self._buffer))
        if size > self._cap:
            raise WireError(f"the peer announced a frame of {size} bytes; the cap is {self._cap}")
        if epoch != self._epoch:
            raise WireError(f"the peer sent a frame of session {epoch} in session {self._epoch}")
        if sequence != self._next:
            raise WireError(f"the peer sent frame {sequence} where {self._next} was due")
        return max(0, PREFIX_BYTES + size - have)

    def _open(self, header: memoryview, given: memoryview, body: memoryview) -> msgspec.Struct:
        if not hmac.compare_digest(mac(self._key, header, body), given):
            raise WireError(
                "a frame has not the seal of this session: another --cluster-key-file, or bytes were altered"
            )
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The reason names types and fields of ours, never the peer's bytes.
            raise WireError(f"frame {self._next} is none of the expected types: {str(error)[:200]}") from error

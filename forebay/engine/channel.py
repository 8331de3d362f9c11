"""Typed frames over an inherited AF_UNIX stream socket.

A socket pair made before the engine is started is the whole transport: there is no path, no listener and nothing to
authenticate, and the death of either side is end-of-file on the other. A frame is an eight-byte header and a msgpack
body, decoded as one of a closed set of plain types. The header is the length of the body and the direction's sequence
number, little-endian uint32 each.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import types
from typing import Final, Generic, NoReturn, TypeVar

import msgspec

from forebay.base.errors import EngineError
from forebay.base.units import human_bytes

MAX_FRAME_BYTES: Final = 128 << 20  # eight images of SmolVLM, of 17 tiles each, have 107 MB
MAX_UNSENT_BYTES: Final = 2 * MAX_FRAME_BYTES  # a peer that far behind is not reading any more
RECEIVE_BYTES: Final = 256 << 10

_HEADER = struct.Struct("<II")
_SEQUENCES = 1 << 32

T = TypeVar("T")


class ChannelError(EngineError):
    """The peer sent bytes that are not a frame, or a frame cannot be sent."""

    default_code = "channel_error"


class FrameTooLarge(ChannelError):
    """The frame to send is over `MAX_FRAME_BYTES`; nothing was sent and the channel is as before."""

    default_code = "frame_too_large"


class ChannelClosed(ChannelError):
    """The peer is gone, or has stopped reading."""

    default_code = "channel_closed"


class FrameEncoder:
    """Frames to bytes, numbered in the order of the calls."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0

    def encode(self, frame: msgspec.Struct) -> bytearray:
        """Raises FrameTooLarge, and then has not used up a number."""
        data = bytearray(_HEADER.size)
        self._encoder.encode_into(frame, data, _HEADER.size)
        size = len(data) - _HEADER.size
        if size > MAX_FRAME_BYTES:
            cap = human_bytes(MAX_FRAME_BYTES)
            raise FrameTooLarge(f"a {type(frame).__name__} frame of {human_bytes(size)} is over the cap of {cap}")
        _HEADER.pack_into(data, 0, size, self._next)
        self._next = (self._next + 1) % _SEQUENCES
        return data


class FrameDecoder(Generic[T]):
    """Bytes, cut anywhere, to frames of a union of tagged structs. Holds at most one unfinished frame.

    The first fault raises ChannelError, and so does every later call. A fault is a length over the cap, a sequence
    number out of order, or a body that is none of the union's types: after it the stream has no frame boundaries one
    could trust.
    """

    def __init__(self, union: type[T] | types.UnionType) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()
        self._next = 0
        self._fault: str | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Append bytes from the socket and return the frames that they complete, in order; the rest is kept. Raises
        ChannelError."""
        if self._fault is not None:
            raise ChannelError(self._fault)
        self._buffer += data
        frames: list[T] = []
        offset = 0
        with memoryview(self._buffer) as view:
            while len(view) - offset >= _HEADER.size:
                size, sequence = _HEADER.unpack_from(view, offset)
                if size > MAX_FRAME_BYTES or sequence != self._next:
                    self._refuse_header(size, sequence)
                end = offset + _HEADER.size + size
                if end > len(view):
                    break
                frames.append(self._decode(view[offset + _HEADER.size : end]))
                self._next = (self._next + 1) % _SEQUENCES
                offset = end
        del self._buffer[:offset]
        return frames

    def _refuse_header(self, size: int, sequence: int) -> NoReturn:
        if size > MAX_FRAME_BYTES:
            self._refuse(f"the peer announced a frame of {size} bytes; the cap is {MAX_FRAME_BYTES}")
        self._refuse(f"the peer sent frame number {sequence} where {self._next} was due")

    def _decode(self, body: memoryview) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The reason names types and fields of ours, never the peer's bytes.
            self._refuse(f"frame {self._next} is none of the expected types: {str(error)[:200]}")

    def _refuse(self, fault: str) -> NoReturn:
        self._fault = fault
        raise ChannelError(fault)


class Channel(Generic[T]):
    """The polling side, for the engine's loop: no call waits for the peer longer than its time-out.

    Owns the socket. `union` is what it receives. Any thread may send, one receives. After `read_ahead` another thread
    reads while that one is elsewhere.
    """

    def __init__(
        self, sock: socket.socket, union: type[T] | types.UnionType, *, max_unsent_bytes: int = MAX_UNSENT_BYTES
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._encoder = FrameEncoder()
        self._decoder: FrameDecoder[T] = FrameDecoder(union)
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._max_unsent_bytes = max_unsent_bytes
        self._incoming = memoryview(bytearray(RECEIVE_BYTES))
        self._reading = threading.Condition()  # guards all that follows
        self._frames: list[T] = []  # that have arrived
        self._num_ahead_bytes = 0  # that were read since they were taken
        self._waits = self._ended = False  # whether the receiver waits for the socket, and whether it is closed
        self._error: ChannelError | None = None  # behind these frames
        self._reader: threading.Thread | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def also_wake_for(self, fd: int) -> None:
        """Make `receive` return early while this descriptor of another owner is readable."""
        self._poll.register(fd, select.POLLIN)

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent)

    def send(self, frame: msgspec.Struct) -> None:
        """Send now what the kernel takes and keep the rest. Raises FrameTooLarge, or ChannelClosed when the peer is
        gone or has left more than the cap unread."""
        with self._sending:
            self._unsent += self._encoder.encode(frame)
            self._flush()
            if len(self._unsent) > self._max_unsent_bytes:
                raise ChannelClosed(f"the peer left {human_bytes(len(self._unsent))} unread and is taken for dead")

    def flush(self) -> None:
        """Send the unsent bytes as far as the kernel takes them."""
        if self._unsent:
            with self._sending:
                self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(f"the peer is gone ({error.strerror})") from error
            del self._unsent[:sent]

    def receive(self, timeout_s: float | None) -> list[T]:
        """Return the frames that have arrived; wait up to `timeout_s` (None: without end) for the first bytes.

        Raises ChannelClosed at end-of-file, ChannelError for bytes that are not a frame.
        """
        self.flush()
        with self._reading:
            self._waits = timeout_s != 0 and not self._frames and self._error is None
        readable = not self._waits or self._wait(timeout_s)
        with self._reading:
            self._waits = False
            self._reading.notify()
            if readable:
                self._read()
            frames, self._frames, self._num_ahead_bytes = self._frames, [], 0
            if self._error and not frames:
                raise self._error
        return frames

    def read_ahead(self) -> None:
        """Read from now on in a thread of its own while no call of `receive` waits. The kernel holds about 200 kB: else
        a request behind many others, or one with images, arrives over as many of the engine's steps as it has times
        that."""
        self._reader = threading.Thread(target=self._read_on, name="channel-reader", daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while not (self._ended or self._error):
            poll.poll()
            with self._reading:
                self._reading.wait_for(lambda: self._ended or not (self._waits or self._is_far_ahead))
                if not self._ended:
                    self._read()

    @property
    def _is_far_ahead(self) -> bool:
        return self._num_ahead_bytes >= MAX_FRAME_BYTES

    def _read(self) -> None:
        """Read once, without waiting. An error is kept until the frames before it were taken."""
        if self._error:
            return
        try:
            size = self._sock.recv_into(self._incoming)
            if size == 0:
                raise ChannelClosed("the peer has closed the channel")
            self._num_ahead_bytes += size
            self._frames += self._decoder.feed(self._incoming[:size])
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = ChannelClosed(f"the peer is gone ({error.strerror})")
        except ChannelError as error:
            self._error = error

    def _wait(self, timeout_s: float | None) -> bool:
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = self._poll.poll(None if timeout_s is None else max(1, round(timeout_s * 1000)))
        return any(mask & ~select.POLLOUT for _, mask in events)

    def close(self, linger_s: float = 0.0) -> None:
        """Close, after up to `linger_s` in which unsent bytes are sent."""
        with self._sending, self._sock:
            with contextlib.suppress(OSError):
                if self._unsent and linger_s:
                    self._sock.settimeout(linger_s)
                    self._sock.sendall(self._unsent)
            if self._reader:
                self._end_reader(self._reader)

    def _end_reader(self, reader: threading.Thread) -> None:
        with self._reading:
            self._ended = True
            self._reading.notify()
        with contextlib.suppress(OSError):  # the peer may be gone
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes it: closing a socket wakes no poll
        reader.join()

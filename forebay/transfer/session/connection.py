"""One connection between two engines, from the greeting on: sealed frames, sent and received without waiting."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from forebay.base.errors import WireError
from forebay.config.engine_config import Chaos
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.frames import NONCE_BYTES, PROTOCOL, Challenge, Hello, ToDecode, ToPrefill
from forebay.transfer.wire.framing import MAX_GREETING_BYTES, FrameDecoder, FrameEncoder, Keys

RECEIVE_BYTES: Final = 256 << 10
MAX_UNSENT_BYTES: Final = 128 << 20  # a peer that far behind is not reading any more


class ConnectionLost(Exception):
    """The peer is gone, or has stopped reading; the text says which."""


class Connection:
    """Owns a socket that does not block. `heard` is when the peer last said something that was whole."""

    def __init__(self, sock: socket.socket, where: str, clock: Callable[[], float], chaos: Chaos) -> None:
        self.sock, self.where, self._clock = sock, where, clock
        self.heard = clock()
        self._unsent = bytearray()
        self._faults = Faults(Chaos(), clock)
        self._chaos = chaos
        self.encoder: FrameEncoder
        self.decoder: FrameDecoder

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, frame: msgspec.Struct) -> None:
        """Raises ConnectionLost, and WireError for a frame that is too large."""
        self._faults.put(self.encoder.encode(frame))
        self.flush()

    def flush(self) -> None:
        for data in self._faults.due():
            self._unsent += data
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            del self._unsent[:sent]
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise ConnectionLost(f"it left {len(self._unsent)} bytes unread")

    def joined(self) -> None:
        """From here on there are faults, where they are asked for: a greeting that is lost shows only in time."""
        self._faults = Faults(self._chaos, self._clock)

    @property
    def holds_back(self) -> bool:
        """Frames that are to leave later."""
        return self._faults.holds_back

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> Iterator[msgspec.Struct]:
        """The frames that have come. Raises ConnectionLost, and WireError for what is no frame of this session."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("end of file")
        self.decoder.feed(data)
        # Asked for anew each time: a greeting changes it.
        while (frame := self.decoder.take()) is not None:
            self.heard = self._clock()
            yield frame

    def close(self) -> None:
        self.sock.close()

    # -- greetings -------------------------------------------------------------------------------------------------

    def greet(self, cluster_key: bytes, hello: Hello) -> None:
        """Decode: begin; what comes back is a `Challenge`."""
        keys = Keys(cluster_key)
        self.encoder = FrameEncoder(keys.to_prefill, 0)
        self.decoder = FrameDecoder(Challenge, keys.to_decode, 0, cap=MAX_GREETING_BYTES)
        self.send(hello)

    def enter(self, cluster_key: bytes, hello: Hello, challenge: Challenge) -> None:
        """Decode: go on with the session's keys."""
        keys = session_keys(cluster_key, hello, challenge)
        self.encoder = FrameEncoder(keys.to_prefill, hello.epoch)
        self.decoder = self.decoder.succeeded_by(FrameDecoder(ToDecode, keys.to_decode, hello.epoch))

    def await_greeting(self, cluster_key: bytes) -> None:
        """Prefill: what comes first is a `Hello`."""
        keys = Keys(cluster_key)
        self.encoder = FrameEncoder(keys.to_decode, 0)
        self.decoder = FrameDecoder(Hello, keys.to_prefill, 0, cap=MAX_GREETING_BYTES)

    def admit(self, cluster_key: bytes, hello: Hello, instance: str) -> None:
        """Prefill: answer, and go on with the session's keys. A recorded `Hello` comes this far and no further.
        WireError, once it has been told, for a peer of another protocol."""
        challenge = Challenge(protocol=PROTOCOL, instance=instance, nonce=secrets.token_bytes(NONCE_BYTES))
        self.send(challenge)
        if hello.protocol != PROTOCOL:
            raise WireError(f"decode speaks protocol {hello.protocol}, prefill {PROTOCOL}")
        keys = session_keys(cluster_key, hello, challenge)
        self.encoder = FrameEncoder(keys.to_decode, hello.epoch)
        self.decoder = self.decoder.succeeded_by(FrameDecoder(ToPrefill, keys.to_prefill, hello.epoch))


def session_keys(cluster_key: bytes, hello: Hello, challenge: Challenge) -> Keys:
    return Keys(cluster_key, msgspec.msgpack.encode(hello), msgspec.msgpack.encode(challenge))

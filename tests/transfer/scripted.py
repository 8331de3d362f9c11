"""A peer that says what a test wants, in the real language: for what a right one never says."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from threading import Event, Lock, Thread
from typing import TypeVar

import msgspec
import numpy as np

from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.requests.pieces import Chunk, pieces
from forebay.requests.transfers import Offer, Span, Ticket
from forebay.transfer.session.connection import Connection, ConnectionLost, tune
from forebay.transfer.transports import shm
from forebay.transfer.wire import frames
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.frames import PROTOCOL, Layout
from forebay.transfer.wire.memory import HostMemory, checksum, chunk_bytes, shapes_of
from tests.deadlines import wait_until
from tests.transfer.ends import N
from tests.transfer.pair import KEY, Half, half, spans_of

F = TypeVar("F", bound=msgspec.Struct)


class Peer:
    """One connection, read when a frame is waited for."""

    def __init__(self, sock: socket.socket, key: bytes = KEY) -> None:
        tune(sock)
        self.link, self.key = Connection(sock, "scripted", time.time, Chaos()), key
        self.unread: list[msgspec.Struct] = []
        self._lock, self._closed = Lock(), Event()

    def wait(self, kind: type[F]) -> F:
        wait_until(lambda: self._find(kind) is not None)
        found = self._find(kind)
        assert found is not None
        self.unread.remove(found)
        return found

    def _find(self, kind: type[F]) -> F | None:
        if not any(isinstance(frame, kind) for frame in self.unread):
            select.select([self.link], [], [], 0.05)
            with self._lock:
                self.unread += self.link.receive()
        return next((frame for frame in self.unread if isinstance(frame, kind)), None)

    def send(self, *sent: msgspec.Struct) -> None:
        with self._lock:
            for frame in sent:
                self.link.send(frame)

    def beat(self) -> None:
        """From now on, as a right peer does, in a thread: else it is taken for silent after three beats."""
        Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(ConnectionLost):
            while not self._closed.wait(0.1):
                self.send(frames.Beat())

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self.link.close()


class ScriptedPrefill:
    """Listens; `join` carries out the handshake with a decode engine."""

    def __init__(self, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self.listener.getsockname()[1]
        self.control: Peer
        self.data: Peer

    def _accept(self, instance: str) -> Peer:
        peer = Peer(self.listener.accept()[0])
        peer.link.await_greeting(KEY)
        peer.link.admit(KEY, peer.wait(frames.Hello), instance)
        return peer

    def join(
        self, decode: Half, layout: Layout, transport: str, instance: str = "scripted", *, beats: bool = False
    ) -> None:
        self.control = self._accept(instance)
        self.control.wait(frames.Introduce)
        self.control.send(frames.Welcome(layout, transport, "", 0))
        if transport == "tcp":
            self.data = self._accept(instance)
            self.data.wait(frames.Attach)
        else:
            shapes = shapes_of(decode.cache)
            source = HostMemory.of(decode.cache, shapes)
            self.writer, _ = shm.join(
                self.control.wait(frames.Invite).address,
                shapes,
                source,
                page_size=decode.cache.page_size,
                timeout_s=60.0,
                faults=Faults(Chaos(), time.time),
            )
        self.control.send(frames.Joined())
        if beats:
            self.control.beat()

    def chunks(self, prefill: Half, nonce: bytes, span: Span, num_tokens: int) -> list[tuple[Chunk, bytes]]:
        """All of a prompt's KV as it lies there."""
        shapes = shapes_of(prefill.cache)
        memory, found = HostMemory.of(prefill.cache, shapes), []
        for piece in pieces("kv", shapes["kv"], span, 0, num_tokens):
            data = memory.gather(piece, np.empty(chunk_bytes(shapes), dtype=np.uint8)).tobytes()
            chunk = Chunk(
                nonce=nonce,
                kind="kv",
                region=piece.region,
                num_regions=piece.num_regions,
                first=piece.first,
                end=piece.end,
                num_bytes=len(data),
                checksum=checksum(data),
            )
            found.append((chunk, data))
        return found

    def send_chunk(self, chunk: Chunk, data: bytes) -> None:
        self.data.send(chunk)
        self.data.link.sock.setblocking(True)
        self.data.link.sock.sendall(data)
        self.data.link.sock.setblocking(False)

    def close(self) -> None:
        for peer in (getattr(self, "control", None), getattr(self, "data", None)):
            if peer is not None:
                peer.close()
        self.listener.close()


def hello(instance: str, epoch: int, *, data: bool = False) -> frames.Hello:
    return frames.Hello(protocol=PROTOCOL, instance=instance, epoch=epoch, nonce=secrets.token_bytes(32), data=data)


def scripted_decode(port: int, said: frames.Hello, key: bytes = KEY) -> Peer:
    """Connects to a prefill engine, as far as the session's keys."""
    peer = Peer(socket.create_connection(("127.0.0.1", port)), key)
    peer.link.greet(key, said)
    peer.link.enter(key, said, peer.wait(frames.Challenge))
    return peer


@contextlib.contextmanager
def decode_alone(**others: object) -> Iterator[tuple[ScriptedPrefill, Half]]:
    """A decode engine with a peer that says what the test wants."""
    decode, peer = half(DisaggregationMode.DECODE, **others), ScriptedPrefill()  # type: ignore[arg-type]
    try:
        yield peer, decode
    finally:
        peer.close()
        decode.transfers.close()


def scripted_offer(peer: ScriptedPrefill, decode: Half) -> Offer:
    ticket = Ticket(decode.transfers.instance, 7, os.urandom(16))
    spans = spans_of(decode, N)
    made = Offer(ticket=ticket, host="127.0.0.1", port=peer.port, num_tokens=N, digest=b"", start=0, spans=spans)
    decode.transfers.submit(made)
    return made


def nobody_listens() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def scripted_nowhere(decode: Half, port: int, host: str = "127.0.0.1") -> Offer:
    ticket = Ticket(decode.transfers.instance, 7, os.urandom(16))
    made = Offer(
        ticket=ticket, host=host, port=port, num_tokens=N, digest=b"", start=0, spans=spans_of(decode, N)
    )  # fmt: skip
    decode.transfers.submit(made)
    return made

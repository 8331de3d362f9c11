"""Both ends of a session between a decode engine and a prefill server, from its beginning until it is over."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import msgspec

from forebay.base.errors import WireError
from forebay.base.log import event, get_logger
from forebay.requests.pieces import KindShape
from forebay.requests.updates import Failure
from forebay.transfer.session import data_thread
from forebay.transfer.session.connection import Connection, ConnectionLost, ConnectionUser, LocalEngine, Loop, tune
from forebay.transfer.session.data_thread import DataThread
from forebay.transfer.wire import frames
from forebay.transfer.wire.frames import NONCE_BYTES, PROTOCOL
from forebay.transfer.wire.memory import Reach, Writer

Address = tuple[str, int]

UNLIMITED: Final = frames.MAX_ID + 1  # ids of a pool that is not written to from here

log = get_logger("transfer")


class DecodeSide(Protocol):
    """Receiver of a session's events on decode, called by the loop's thread."""

    def on_joined(self, session: SessionWithPrefill) -> None:
        """Make offers: the peer takes them from here on."""
        ...

    def on_session_frame(self, session: SessionWithPrefill, frame: object) -> None:
        """Take a frame about tickets."""
        ...

    def on_session_refused(self, session: SessionWithPrefill, failure: Failure) -> None:
        """The two do not fit together, nor would they in the next session. It is lost next; frames still go out."""
        ...

    def on_session_lost(self, session: SessionWithPrefill, failure: Failure) -> None:
        """Forget the session, which is over."""
        ...


class SessionWithPrefill(ConnectionUser):
    """Decode's end: connects at once, and ends with `on_session_lost`. `epoch` is the data thread's name for it, too.
    `reach` is what the peer was let into, where it writes here by itself."""

    def __init__(
        self, engine: LocalEngine, loop: Loop, chunks: DataThread, address: Address, epoch: int, user: DecodeSide
    ) -> None:
        self._engine, self._loop, self._chunks, self._user = engine, loop, chunks, user
        self.address, self.epoch = address, epoch
        self.where = f"prefill server {address[0]}:{address[1]}"
        self.is_joined, self._is_over = False, False
        self.instance = ""  # the process that answered
        self.transport = ""  # that it chose
        self.reach: Reach | None = None
        self._since = self._beat_at = loop.clock()
        self._links: list[Connection] = []  # the control connection; that of chunks until the data thread has it
        self._hellos = [self._hello(data=False), self._hello(data=True)]
        self._connect(address)

    def _hello(self, *, data: bool) -> frames.Hello:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return frames.Hello(protocol=PROTOCOL, instance=self._engine.instance, epoch=self.epoch, nonce=nonce, data=data)

    # -- connections -----------------------------------------------------------------------------------------------

    def _connect(self, address: Address) -> None:
        timeout_s = self._engine.options.bootstrap_timeout_s

        def connect() -> Callable[[], None]:
            sock = socket.create_connection(address, timeout=timeout_s)
            return lambda: self._connected(sock)

        self._loop.beside(self.where, connect, self.lose)

    def _connected(self, sock: socket.socket) -> None:
        if self._is_over:
            sock.close()
            return
        options = self._engine.options
        link = Connection(sock, self.where, self._loop.clock, options.chaos)
        hello = self._hellos[len(self._links)]
        self._links.append(link)
        self._loop.watch(link, self)
        self._try(lambda: tune(sock))
        self._try(lambda: link.greet(options.cluster_key, hello))

    def on_frame(self, link: Connection, frame: object) -> None:
        control, engine = self._links[0], self._engine
        match frame:
            case frames.Challenge() if frame.protocol != PROTOCOL:
                difference = f"protocol: prefill speaks {frame.protocol}, decode {PROTOCOL}"
                self._part(frames.layout_mismatch(difference))
            case frames.Challenge() if link is control:
                self.instance = frame.instance
                link.enter(engine.options.cluster_key, self._hellos[0], frame)
                self.send(frames.Introduce(layout=engine.layout, transports=engine.transports, machine=engine.machine))
            case frames.Challenge():
                link.enter(engine.options.cluster_key, self._hellos[1], frame)
                self._attach(link)
            case frames.Welcome():
                self._welcome(frame)
            case frames.Refused(failure):
                self._part(failure)
            case frames.Joined():
                self.is_joined = True
                link.joined()
                self._user.on_joined(self)
            case _:
                self._user.on_session_frame(self, frame)

    def _welcome(self, frame: frames.Welcome) -> None:
        engine = self._engine
        difference = frames.mismatch(frame.layout, engine.layout)
        if difference or frame.transport not in engine.transports:
            why = difference or f"prefill chose transport {frame.transport!r}, decode has {engine.transports}"
            self._part(frames.layout_mismatch(why))
            return
        self.transport, end = frame.transport, engine.one_sided.get(frame.transport)
        if end is None:
            self._connect(self._links[0].sock.getpeername()[:2])
        else:
            self.reach = end.reach(frame.pid if frame.machine == engine.machine else 0)
            self.send(frames.Invite(self.reach.invitation))

    def _attach(self, link: Connection) -> None:
        self._try(lambda: link.send(frames.Attach()))
        self._loop.unwatch(link)
        self._links.remove(link)
        reader = link.reader(self._engine.memory, self._engine.shapes)
        self._chunks.submit(data_thread.AddReader(self.epoch, reader))

    # -- frames and time -------------------------------------------------------------------------------------------

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame unless the session is over. If that fails the session ends, though not now."""
        self._try(lambda: self._links[0].send(frame))

    def _try(self, send: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            send()
        except (ConnectionLost, WireError, OSError) as error:
            failure = frames.peer_lost(self.where, str(error))
            self._loop.call(lambda: self.lose(failure))  # not now: the caller is about to do more with this session

    def tick(self, now: float) -> None:
        """Send a heartbeat when it is due; end a session that is silent or joined too late."""
        options, silence_s = self._engine.options, self._engine.silence_s
        if not self.is_joined:
            if now - self._since > options.bootstrap_timeout_s:
                self.lose(frames.bootstrap_timeout(self.where, options.bootstrap_timeout_s))
            return
        if now - self._beat_at >= options.heartbeat_s:
            self._beat_at = now
            self.send(frames.Beat())
        if now - self._links[0].last_received_at > silence_s:
            self.lose(frames.heartbeat_timeout(self.where, silence_s))

    # -- the end ---------------------------------------------------------------------------------------------------

    def on_lost(self, link: Connection, failure: Failure) -> None:
        self.lose(failure)

    def _part(self, failure: Failure) -> None:
        self._user.on_session_refused(self, failure)
        self.lose(failure)

    def lose(self, failure: Failure) -> None:
        """Once. What the data thread still reads of it is of no ticket then."""
        if self._is_over:
            return
        self._is_over = True
        if self._links:
            log.warning(event("prefill_lost", where=self.where, code=failure.code, why=failure.message))
        for link in self._links:
            self._loop.unwatch(link)
            link.close()
        self._chunks.submit(data_thread.EndSession(self.epoch))
        if self.reach is not None:
            self.reach.close()
        self.is_joined = False
        self._user.on_session_lost(self, failure)


class PrefillSide(Protocol):
    """Receiver of a session's events on prefill, called by the loop's thread."""

    def on_joined(self, session: SessionWithDecode) -> None:
        """Expect offers: the transport is joined."""
        ...

    def on_session_frame(self, session: SessionWithDecode, frame: object) -> None:
        """Take a frame about tickets."""
        ...

    def on_session_lost(self, session: SessionWithDecode, failure: Failure) -> None:
        """Forget the session, which is over."""
        ...

    def held(self, session: SessionWithDecode) -> list[bytes]:
        """Return the tickets of the session whose leases its next heartbeat renews."""
        ...


class SessionWithDecode(ConnectionUser):
    """Prefill's end, from decode's introduction on; ends with `on_session_lost`. `number` is the data thread's name for
    it, `shapes` are those of decode's caches, with pages of `page_size` tokens."""

    is_joined = is_over = False

    def __init__(
        self,
        engine: LocalEngine,
        loop: Loop,
        chunks: DataThread,
        user: PrefillSide,
        *,
        link: Connection,
        hello: frames.Hello,
        number: int,
        transport: str,
        page_size: int,
    ) -> None:
        self._engine, self._loop, self._chunks, self._user = engine, loop, chunks, user
        self.link, self.hello, self.number, self.transport, self._page_size = link, hello, number, transport, page_size
        self._beat_at = loop.clock()
        self.shapes = {
            kind: replace(shape, page_size=page_size if shape.by_token else 1, num_ids=UNLIMITED)
            for kind, shape in engine.shapes.items()
        }

    @property
    def is_one_sided(self) -> bool:
        """Return whether chunks are written to decode's memory, and not to a connection."""
        return self.transport in self._engine.one_sided

    @property
    def where(self) -> str:
        return f"decode engine {self.hello.instance[:8]} at {self.link.where}"

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame unless the session is over. If that fails the session ends, though not now: the caller may have
        more to do with it."""
        if self.is_over:
            return
        try:
            self.link.send(frame)
        except (ConnectionLost, WireError) as error:
            self._loop.call(partial(self.lose, frames.peer_lost(self.where, str(error))))

    def on_frame(self, link: Connection, frame: object) -> None:
        match frame:
            case frames.Beat():
                pass
            case frames.Invite(address) if self.is_one_sided and not self.is_joined:
                self._invited(address)
            case frames.Offering() if self.is_joined:
                self._user.on_session_frame(self, frame)
            case frames.Declined() | frames.Settled() | frames.Withdrawn():
                self._user.on_session_frame(self, frame)
            case _:
                raise WireError(f"a {type(frame).__name__} frame arrived while none was expected")

    def _invited(self, address: bytes) -> None:
        """Follow decode's invitation to its memory, beside the loop: that may take long."""
        transport = self._engine.one_sided[self.transport]

        def join() -> Callable[[], None]:
            writer, shapes = transport.join(address, self._page_size)
            return lambda: self.join(writer, shapes)

        self._loop.beside(self.where, join, self.lose)

    def join(self, writer: Writer, shapes: dict[str, KindShape] | None = None) -> None:
        """Begin to take offers, whose chunks `writer` writes; it is closed if the session is over."""
        if self.is_over:
            writer.close()
            return
        self.shapes, self.is_joined = shapes or self.shapes, True
        self._chunks.submit(data_thread.AddWriter(self.number, writer))
        log.info(event("decode_joined", where=self.where, transport=self.transport))
        self.send(frames.Joined())
        self.link.joined()
        self._user.on_joined(self)

    def tick(self, now: float) -> None:
        """Send a heartbeat when it is due, and end the session if its peer is silent."""
        if now - self._beat_at >= self._engine.options.heartbeat_s:
            self._beat_at = now
            self.send(frames.Beat(self._user.held(self)))
        if now - self.link.last_received_at > self._engine.silence_s:
            self.lose(frames.heartbeat_timeout(self.where, self._engine.silence_s))

    def on_lost(self, link: Connection, failure: Failure) -> None:
        self.lose(failure)

    def lose(self, failure: Failure) -> None:
        """End the session, once. The user is notified last: messages that it then sends are dropped."""
        if self.is_over:
            return
        self.is_over = True
        log.warning(event("decode_lost", where=self.where, code=failure.code, why=failure.message))
        self._loop.unwatch(self.link)
        self.link.close()
        self._chunks.submit(data_thread.EndSession(self.number))
        self._user.on_session_lost(self, failure)

"""Connections between two engines, the loop that serves them on one thread, and the guard around each peer."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec

from forebay.base.clock import RunClock
from forebay.base.errors import WireError
from forebay.base.log import event, get_logger
from forebay.base.wake import Wake, WakingQueue
from forebay.config.engine_config import Chaos, DisaggregationOptions
from forebay.requests.pieces import KindShape
from forebay.requests.transfers import Event
from forebay.requests.updates import Failure
from forebay.transfer.transports.tcp import BUFFER_BYTES, TcpReader, TcpWriter
from forebay.transfer.wire import frames
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.frames import NONCE_BYTES, PROTOCOL, Bounds, Challenge, Hello, Layout, ToDecode, ToPrefill
from forebay.transfer.wire.framing import MAX_FIRST_BYTES, MAX_GREETING_BYTES, FrameDecoder, FrameEncoder, Keys
from forebay.transfer.wire.memory import Memory, OneSided, chunk_bytes

RECEIVE_BYTES: Final = 256 << 10
MAX_UNSENT_BYTES: Final = 128 << 20  # a peer that far behind is not reading any more
MISSED_BEATS: Final = 3
HOLD_S: Final = 0.005  # between two looks at frames that are held up on purpose

log = get_logger("transfer")


class ConnectionLost(Exception):
    """The peer is gone, or has stopped reading; the text says which."""


NETWORK_ERRORS: Final = (ConnectionLost, OSError)


@dataclass(kw_only=True, slots=True)
class LocalEngine:
    """Properties of this engine that its sessions use. `machine` is the same on one machine. `transports` are those
    that may be used, best first; `one_sided` has this engine's end of each whose writer reaches in by itself. `layout`
    changes with the weights."""

    options: DisaggregationOptions
    instance: str
    layout: Layout
    shapes: dict[str, KindShape]
    memory: Memory
    transports: list[str]
    one_sided: dict[str, OneSided]
    machine: str

    def may_use(self, transport: str, machine: str) -> bool:
        """Return whether a peer on `machine` can use a transport: both ends of some must be on one machine."""
        end = self.one_sided.get(transport)
        return end is None or not end.one_machine or machine == self.machine

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a peer is taken for dead."""
        return MISSED_BEATS * self.options.heartbeat_s


# -- one connection ----------------------------------------------------------------------------------------------------


def tune(sock: socket.socket) -> None:
    """Set the options of every socket between engines: no waiting, no delay, large buffers."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


class Connection:
    """Owns a socket that does not block. `last_received_at` is the time of the peer's last complete frame."""

    def __init__(self, sock: socket.socket, where: str, clock: Callable[[], float], chaos: Chaos) -> None:
        self.sock, self.where, self._clock = sock, where, clock
        self.last_received_at = clock()
        self._unsent = bytearray()
        self._faults = Faults(Chaos(), clock)
        self._chaos = chaos
        self.encoder: FrameEncoder
        self.decoder: FrameDecoder

    def fileno(self) -> int:
        """Return the socket's descriptor, for select."""
        return self.sock.fileno()

    def send(self, frame: msgspec.Struct) -> None:
        """Raises ConnectionLost, and WireError for a frame that is too large."""
        self._faults.put(self.encoder.encode(frame))
        self.flush()

    def flush(self) -> None:
        """Send as many waiting bytes as the socket takes. Raises ConnectionLost, also if too many wait."""
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
        """Inject faults from here on, if they are configured: a greeting that is lost would only show after a
        time-out."""
        self._faults = Faults(self._chaos, self._clock)

    @property
    def holds_back(self) -> bool:
        """Frames that are to leave later."""
        return self._faults.holds_back

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> Iterator[msgspec.Struct]:
        """Return the frames that have arrived. Raises ConnectionLost, and WireError for bytes that are no frame of this
        session."""
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
            self.last_received_at = self._clock()
            yield frame

    def writer(self, memory: Memory, shapes: dict[str, KindShape]) -> TcpWriter:
        """Return a writer of chunks, which owns the socket from here on."""
        staging = memory.staging(chunk_bytes(shapes))
        return TcpWriter(self.sock, self.encoder, memory, staging, Faults(self._chaos, self._clock))

    def reader(self, memory: Memory, shapes: dict[str, KindShape]) -> TcpReader:
        """Return a reader of chunks, which owns the socket from here on."""
        return TcpReader(self.sock, self.decoder, memory.staging(chunk_bytes(shapes)))

    def close(self) -> None:
        """Close the socket; frames that were not sent are lost."""
        self.sock.close()

    # -- greetings -------------------------------------------------------------------------------------------------

    def greet(self, cluster_key: bytes, hello: Hello) -> None:
        """Decode: begin the session; the answer is a `Challenge`."""
        keys = Keys(cluster_key)
        self.encoder = FrameEncoder(keys.to_prefill, 0)
        self.decoder = FrameDecoder(Challenge, keys.to_decode, 0, cap=MAX_GREETING_BYTES)
        self.send(hello)

    def enter(self, cluster_key: bytes, hello: Hello, challenge: Challenge) -> None:
        """Decode: switch to the session's keys."""
        keys = session_keys(cluster_key, hello, challenge)
        self.encoder = FrameEncoder(keys.to_prefill, hello.epoch)
        self.decoder = self.decoder.succeeded_by(FrameDecoder(ToDecode, keys.to_decode, hello.epoch))

    def await_greeting(self, cluster_key: bytes) -> None:
        """Prefill: expect a `Hello` as the first frame."""
        keys = Keys(cluster_key)
        self.encoder = FrameEncoder(keys.to_decode, 0)
        self.decoder = FrameDecoder(Hello, keys.to_prefill, 0, cap=MAX_GREETING_BYTES)

    def admit(self, cluster_key: bytes, hello: Hello, instance: str) -> None:
        """Prefill: answer, and switch to the session's keys. A recorded `Hello` gets this far and no further.
        WireError, after the answer, for a peer of another protocol."""
        challenge = Challenge(protocol=PROTOCOL, instance=instance, nonce=secrets.token_bytes(NONCE_BYTES))
        self.send(challenge)
        if hello.protocol != PROTOCOL:
            raise WireError(f"decode speaks protocol {hello.protocol}, prefill {PROTOCOL}")
        keys = session_keys(cluster_key, hello, challenge)
        self.encoder = FrameEncoder(keys.to_decode, hello.epoch)
        decoder = FrameDecoder(ToPrefill, keys.to_prefill, hello.epoch, cap=MAX_FIRST_BYTES)
        self.decoder = self.decoder.succeeded_by(decoder)


def session_keys(cluster_key: bytes, hello: Hello, challenge: Challenge) -> Keys:
    """Return the keys of the session that these two greetings have agreed on."""
    return Keys(cluster_key, msgspec.msgpack.encode(hello), msgspec.msgpack.encode(challenge))


# -- all connections ---------------------------------------------------------------------------------------------------


class ConnectionUser(Protocol):
    """Receiver of a connection's frames and of its loss, called by the loop's thread."""

    def on_frame(self, link: Connection, frame: object) -> None:
        """Take a frame; an exception ends the session."""
        ...

    def on_lost(self, link: Connection, failure: Failure) -> None:
        """End the session of the connection."""
        ...


class Guard:
    """Runs work that one peer caused (C33). `num_rejected` counts the sessions that ended because of a peer's message
    and not because of the network."""

    def __init__(self) -> None:
        self.num_rejected = 0

    def run(self, where: str, work: Callable[[], object], lose: Callable[[Failure], None]) -> None:
        """Run `work` for the peer at `where`. If it raises, call `lose` with the reason; `lose` ends the session."""
        try:
            work()
        except Exception as error:
            lose(self.reason(where, error))

    def reason(self, where: str, error: Exception) -> Failure:
        """Return the failure with which the session at `where` ends, and count and log it."""
        if not isinstance(error, NETWORK_ERRORS):
            self.num_rejected += 1
        if isinstance(error, (WireError, *NETWORK_ERRORS)):
            return frames.peer_lost(where, str(error))
        log.error(event("peer_failed", where=where, why=repr(error)), exc_info=error)
        return frames.peer_rejected(where, error)


class Loop:
    """Serves control connections on one thread, on which all work of sessions and tickets is done.

    It never waits for bytes, so that heartbeats are sent during every copy. An exception while a peer is served ends
    the session with this peer and nothing else (C33). `clock` has the seconds of the current tick.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.clock, self.guard = RunClock(), Guard()
        self.events = WakingQueue[Event](self.clock)
        self.users: dict[Connection, ConnectionUser] = {}
        self.is_closed = self._ending = False
        self._bounds = Bounds(engine.shapes, engine.layout.vocab_size)
        self._calls: deque[Callable[[], object]] = deque()
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept: Callable[[], None] | None = None

    def start(self, tick: Callable[[], None], period_s: float) -> None:
        """Begin to serve; `tick` is called every `period_s` seconds."""
        self._thread = threading.Thread(target=partial(self._run, tick, period_s), name="transfers", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Stop serving, and wait for the thread's end."""
        self._ending = True
        self._wake.set()
        self._thread.join()

    def close(self) -> None:
        """Release all resources and finish the calls that wait; later ones run on the thread that makes them."""
        self._selector.close()
        self._wake.close()
        self.events.close()
        self.is_closed = True
        self._finish_calls()

    # -- for sessions ----------------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket, accept: Callable[[], None]) -> None:
        """Call `accept` for each new connection to `listener`."""
        self._accept = accept
        self._selector.register(listener, selectors.EVENT_READ)

    def watch(self, link: Connection, user: ConnectionUser) -> None:
        """Pass the frames of a connection to `user`; of one that is watched already, from the next frame on."""
        if link not in self.users:
            self._selector.register(link, selectors.EVENT_READ, link)
        self.users[link] = user

    def unwatch(self, link: Connection) -> None:
        """Stop reading a connection; nothing if it is not watched."""
        if self.users.pop(link, None) is not None:
            self._selector.unregister(link)

    def emit(self, what: Event) -> None:
        """Pass an event to the engine; on the loop's thread only."""
        self.events.put(what)

    def call(self, work: Callable[[], object]) -> None:
        """Have `work` done by the loop's thread; from any thread. After `close` the owner of what `work` uses is gone:
        `work` itself must find that, and release it."""
        self._calls.append(work)
        self._wake.set()
        if self.is_closed:
            self._finish_calls()

    def beside(self, where: str, work: Callable[[], Callable[[], None]], lose: Callable[[Failure], None]) -> None:
        """Run `work`, which may wait, on a thread of its own, and what it returns on the loop's thread. If either
        raises, call `lose` on the loop's thread, as `Guard.run` does."""

        def run() -> None:
            try:
                then = work()
            except Exception as error:
                self.call(partial(lose, self.guard.reason(where, error)))
            else:
                self.call(lambda: self.guard.run(where, then, lose))

        threading.Thread(target=run, name="transfer", daemon=True).start()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self, tick: Callable[[], None], period_s: float) -> None:
        try:
            next_tick = 0.0
            while not self._ending:
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + period_s
                    self.clock.tick()
                    tick()
                held_back = any(link.holds_back for link in self.users)
                if held_back:
                    self._flush()
                self.turn(HOLD_S if held_back else max(0.0, next_tick - time.monotonic()))
        except Exception:
            log.exception(event("transfers_ended"))
            self.events.wake()

    def turn(self, timeout_s: float) -> None:
        """Serve the ready connections, after at most `timeout_s` seconds, and all calls."""
        for key, mask in self._selector.select(timeout_s):
            if key.data is not None:
                self._serve(key.data, mask)
            elif key.fileobj is not self._wake and self._accept is not None:
                self._accept()
        self._wake.clear()
        while self._calls:
            self._calls.popleft()()
        for link in self.users:
            self._selector.modify(
                link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0), link
            )

    def _serve(self, link: Connection, mask: int) -> None:
        user = self.users.get(link)
        if user is not None:
            lose = lambda failure: self.users.get(link, user).on_lost(link, failure)  # noqa: E731
            self.guard.run(link.where, partial(self._talk, link, mask), lose)

    def _talk(self, link: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if mask & selectors.EVENT_READ:
            for frame in link.receive():
                self._bounds.check(frame)
                self.users[link].on_frame(link, frame)
                if link not in self.users:
                    return

    def _flush(self) -> None:
        """Send the frames that were held back."""
        for link, user in [*self.users.items()]:
            self.guard.run(link.where, link.flush, partial(user.on_lost, link))

    def _finish_calls(self) -> None:
        while True:
            try:
                work = self._calls.popleft()
            except IndexError:  # none is left, or another thread was first
                return
            work()

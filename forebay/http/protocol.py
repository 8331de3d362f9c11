"""uvicorn's HTTP protocol with deadlines, header limits, a cut for slow readers and a limit of connections.

These belong below ASGI: an application is only called when the headers are complete, and cannot see the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from forebay.base.errors import ForebayError, Overloaded
from forebay.base.log import event, get_logger
from forebay.base.loop_clock import LoopClock, Timer
from forebay.config.config import ServerConfig
from forebay.http.errors import HttpError, error_headers, error_json
from forebay.http.parser import RequestParser

CONNECTION: Final = "forebay.connection"
MAX_BUFFERED_BYTES: Final = 1 << 20  # of one stream whose reader is slow
MAX_PIPELINED: Final = 16  # requests of a connection that wait for the answer to the one before
FULL_HOUSE_S: Final = 2.0  # how long a connection above the cap may take to say its request

LIVENESS: Final = ("GET", "/health")  # the one request that a connection above the cap may send
_TIMEOUT: Final = "request_timeout"

log = get_logger("server")


class Connection(Protocol):
    """The interface of a connection to the response that is written to it."""

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of the body of an answer whose head, without a length, has been sent: ASGI's `send` without its
        coroutine, for one chunk per token. Returns False if the reader has left, or was too slow and has been
        disconnected."""


def protocol_class(config: ServerConfig, clock: LoopClock) -> type[HttpToolsProtocol]:
    """Return the protocol with `config`'s limits, for the connections of one server. Deadlines are measured by `clock`:
    bytes that arrived while the process was stopped are read before a deadline ends."""
    room = ConnectionRoom(config.max_connections)
    return type("BoundedHttpProtocol", (_BoundedHttpProtocol,), {"limits": config, "room": room, "clock": clock})


@dataclass(slots=True)
class Deadline:
    """A timer that can be set, set anew and unset."""

    clock: LoopClock
    timer: Timer | None = None

    def set(self, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` in this time, and not at the time set before."""
        self.unset()
        self.timer = self.clock.call_later(seconds, then)

    def unset(self) -> None:
        """Call nothing."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(slots=True)
class StreamReader:
    """The client that reads a stream. No stream waits for a slow reader: one that falls too far behind is disconnected.
    `deadline` is set while the buffer of the connection is full."""

    limits: ServerConfig
    deadline: Deadline
    transport: asyncio.Transport = field(init=False)  # once the connection is made
    unread_chunks: int = 0

    def pause(self) -> None:
        """Begin to count chunks and time: the buffer of the connection is full."""
        self.unread_chunks = 0
        if self.deadline.timer is None:
            self.deadline.set(self.limits.write_timeout_s, self._disconnect)

    def keeps_up(self) -> bool:
        """Count a chunk that was written into a full buffer. Returns False if the reader was too slow and has been
        disconnected."""
        self.unread_chunks += 1
        behind = self.transport.get_write_buffer_size()
        if self.unread_chunks <= self.limits.max_stream_chunks and behind <= MAX_BUFFERED_BYTES:
            return True
        self._disconnect()
        return False

    def _disconnect(self) -> None:
        log.warning(event("slow_reader_cut", buffered_bytes=self.transport.get_write_buffer_size()))
        self.transport.abort()


class _BoundedHttpProtocol(HttpToolsProtocol):
    limits: ServerConfig
    room: ConnectionRoom
    clock: LoopClock

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self.timeout_keep_alive = self.limits.keep_alive_s  # type: ignore[assignment]  # uvicorn takes whole seconds
        self._deadline = Deadline(self.clock)  # of the headers or the body that is read
        self._reader = StreamReader(self.limits, Deadline(self.clock))
        self._in_headers = True
        self._loose_bytes = 0  # fed since the last complete head or piece of a body
        self._parsed_bytes = 0  # of complete header lines, and trailer lines
        self._refusal: ForebayError | None = None
        self._ends_with_connection = False  # the body that is written, which has neither a length nor chunks
        self.over_cap = False

    # Reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.room.enter(self):
            transport.abort()
            return
        self._reader.transport = transport
        self._deadline.set(FULL_HOUSE_S if self.over_cap else self.limits.header_timeout_s, self._on_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.leave(self)
        self._deadline.unset()
        self._reader.deadline.unset()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers and self._deadline.timer is None:
            self._deadline.set(self.limits.header_timeout_s, self._on_deadline)
        self._loose_bytes += len(data)
        super().data_received(data)
        if self._loose_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(self._headers_too_large())

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer field, which comes after the body, is dropped: no proxy and no log saw it where headers are decided
        on (RFC 9110, 6.5.1)."""
        if self._in_headers:
            super().on_header(name, value)
        self._count_header(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._loose_bytes = 0
        self._deadline.set(self.limits.body_timeout_s, self._on_deadline)
        if not self.url.startswith(b"/"):
            self._take_authority()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = Overloaded(f"{MAX_PIPELINED} requests wait for the answer to the one before: wait for it")
            raise httptools.HttpParserError("too many requests at once")
        if self.over_cap and (self.parser.get_method().decode(), self._path()) != LIVENESS:
            limit = self.limits.max_connections
            self._refusal = Overloaded(f"{limit} connections are open; no more are taken: try again later")
            raise httptools.HttpParserError("no room")
        self._unset_keepalive_if_required()  # set if the body before it ended in the same piece
        if self._is_old():
            self.expect_100_continue = False  # which HTTP/1.0 does not have (RFC 9110, 10.1.1)
        super().on_headers_complete()
        if self.over_cap:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._deadline.unset()
        self._in_headers = True
        self._loose_bytes = self._parsed_bytes = 0
        if not self.cycle.response_complete:
            self.room.work(self)
        elif not self.transport.is_closing():  # it was answered before its body ended, which has unset the timer
            self._unset_keepalive_if_required()
            wait = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = wait

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.room.wait(self)
        super().on_response_complete()

    def give_way(self) -> None:
        if self._in_headers and self._loose_bytes == 0:
            self.transport.close()
        else:
            self._refuse(HttpError(408, "the request came so slowly that others needed its place", code=_TIMEOUT))

    def _is_old(self) -> bool:
        """Whether the request is one of HTTP/1.0, which has neither chunks nor interim answers."""
        return self.parser.get_http_version() != "1.1"

    def _take_authority(self) -> None:
        """A target that names a host is the one that counts, and not the Host field (RFC 9112, 3.2.2)."""
        _, found, location = self.url.partition(b"://")
        if found and sum(name == b"host" for name, _ in self.headers) == 1:
            authority = location.partition(b"/")[0].partition(b"?")[0]
            self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", authority)]

    def _count_header(self, num_bytes: int) -> None:
        """Raising in a parser's callback stops the parser; `send_400_response` then says why."""
        self._parsed_bytes += num_bytes
        if len(self.headers) > self.limits.max_headers or self._parsed_bytes > self.limits.max_header_bytes:
            self._refusal = self._headers_too_large()
            raise httptools.HttpParserError("headers too large")

    def _headers_too_large(self) -> HttpError:
        limits = self.limits
        what = f"at most {limits.max_headers} headers and {limits.max_header_bytes} bytes of them are read"
        return HttpError(431, what, code="headers_too_large")

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or HttpError(400, "this is not an HTTP/1.1 request", code="invalid_http"))

    def _refuse(self, error: ForebayError) -> None:
        """Answer without the application and close."""
        self._deadline.unset()
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = error_json(error, self._path())
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **error_headers(error)}.items()]
            self.transport.write(STATUS_LINE[error.status] + b"".join(lines) + b"\r\n" + body)
        self.transport.close()

    def _path(self) -> str:
        """Return the path of the request's target, as far as it has been read."""
        return getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")

    def _on_deadline(self) -> None:
        what = "headers" if self._in_headers else "body"
        self._refuse(HttpError(408, f"the request's {what} did not arrive in time", code=_TIMEOUT))

    # Writing

    def pause_writing(self) -> None:
        self._reader.pause()

    def resume_writing(self) -> None:
        self._reader.deadline.unset()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":
            app = _before_sending(app, partial(self._send_without_chunks, cycle))
        elif cycle.waiting_for_100_continue:
            app = _before_sending(app, partial(_close_unless_read, cycle))
        super()._start_asgi_task(cycle, app)

    def _send_without_chunks(self, cycle: RequestResponseCycle, message: Message) -> None:
        """End a body of unknown length with the connection, as HTTP/1.0 has it (RFC 9112, 6.3)."""
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._ends_with_connection = b"content-length" not in names
            cycle.chunked_encoding = False if self._ends_with_connection else None
        elif self._ends_with_connection:
            cycle.expected_content_length = len(message.get("body", b""))  # of this piece

    def write_chunk(self, data: bytes) -> bool:
        if self.transport.is_closing():
            return False
        self.transport.write(data if self._ends_with_connection else b"%x\r\n%b\r\n" % (len(data), data))
        return self._reader.deadline.timer is None or self._reader.keeps_up()


def _close_unless_read(cycle: RequestResponseCycle, message: Message) -> None:
    """Close behind an answer to a request whose client still waits with the body, which then does not come (RFC 9110,
    10.1.1)."""
    if message["type"] == "http.response.start" and cycle.waiting_for_100_continue and cycle.more_body:
        cycle.keep_alive = False


def _before_sending(app: ASGIApp, look: Callable[[Message], None]) -> ASGIApp:
    """Return the application, each message of which `look` sees before it is sent."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def look_and_send(message: Message) -> None:
            look(message)
            await send(message)

        await app(scope, receive, look_and_send)

    return run


SPARE: Final = 32  # connections above the cap, for /health


class Guest(Protocol):
    """A connection. `over_cap` is set by `ConnectionRoom.enter`."""

    over_cap: bool

    def give_way(self) -> None:
        """Close: another one needs the place."""


class ConnectionRoom:
    """At most `limit` connections. Where all places are taken, a new one gets that of the connection that has waited
    longest without having said a whole request. Where every connection has a request under way, `SPARE` more are let in
    `over_cap`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: set[Guest] = set()
        self._waiting: dict[Guest, None] = {}  # for a whole request; the first has waited longest

    def enter(self, guest: Guest) -> bool:
        """Take a place for a connection. Returns False if all places are taken by busy connections."""
        if len(self._open) >= self._limit:
            self._make_room()
        if len(self._open) >= self._limit + SPARE:
            return False
        guest.over_cap = len(self._open) >= self._limit
        self._open.add(guest)
        self._waiting[guest] = None
        return True

    def wait(self, guest: Guest) -> None:
        """Mark a connection as waiting for its next request."""
        if guest in self._open:
            self._waiting.pop(guest, None)
            self._waiting[guest] = None

    def work(self, guest: Guest) -> None:
        """Mark a connection as working: its request is complete, and it waits for the answer."""
        self._waiting.pop(guest, None)

    def leave(self, guest: Guest) -> None:
        """Forget a connection that has closed; its place is free."""
        self._open.discard(guest)
        self._waiting.pop(guest, None)

    def _make_room(self) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is None or (oldest.over_cap and len(self._open) < self._limit + SPARE):
            return  # those above the cap came last: before they go, all the spare places must be taken
        self.leave(oldest)
        oldest.give_way()

"""Connections to servers behind the router: a head, and then the body piece by piece as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import httptools

from forebay.base.errors import Unavailable
from forebay.base.http_client import KeptAlive, Origin, is_interim

CONNECT_TIMEOUT_S: Final = 5.0
IDLE_S: Final = 5.0  # less than our servers keep an idle connection: of the two we are the one that closes
MEMBER_LOST: Final = "member_lost"
MAX_IDLE: Final = 64  # connections to one server
_DROP: Final[Callable[[bytes], None]] = lambda data: None  # noqa: E731


class Head(NamedTuple):
    """Status line and headers of an answer."""

    status: int
    headers: dict[str, str]  # names in lower case


class Upstream(KeptAlive):
    """One connection, one request at a time."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin)
        self._loop = asyncio.get_running_loop()
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._head: asyncio.Future[Head] = self._loop.create_future()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._body = bytearray()  # what came before anybody wanted it
        self._sink: Callable[[bytes], None] | None = None

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> None:
        """Write a request, with `body` as it is; `headers` name its kind."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._sink = {}, None
        self._head, self._end = self._loop.create_future(), self._loop.create_future()
        self._body.clear()
        lines = [f"{method} {self.origin.prefix}{path} HTTP/1.1", f"Host: {self.origin.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))

    async def head(self) -> Head:
        """Raises Unavailable where the connection breaks first."""
        return await asyncio.shield(self._head)

    def relay(self, sink: Callable[[bytes], None] = _DROP) -> None:
        """Write the body to `sink`: the bytes received so far, and all later ones."""
        self._sink = sink
        if self._body:
            sink(bytes(self._body))
            self._body.clear()

    async def ended(self) -> None:
        """Wait for the end of the answer. Raises Unavailable where the connection breaks first."""
        await asyncio.shield(self._end)

    async def whole(self) -> bytes:
        """Read the whole body, for an answer that is not relayed."""
        await self.ended()
        return bytes(self._body)

    @property
    def at_rest(self) -> bool:
        """Whether another request can be sent: the answer to the last one has come whole."""
        return self.is_open and self._end.done() and self._end.exception() is None

    # asyncio's side

    def data_received(self, data: bytes) -> None:
        """Feed the HTTP parser; bytes that are not HTTP, or that no request asked for, close the connection."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, AttributeError):  # or one that nobody asked for
            self._fail("does not speak HTTP")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending request, if any; called by asyncio."""
        self._fail("closed the connection before its answer was complete")

    def _fail(self, what: str) -> None:
        error = Unavailable(f"{self.origin} {what}", code=MEMBER_LOST)
        for future in (self._head, self._end):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits for it

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; called by the parser."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Resolve the head of the answer, unless another one follows; called by the parser."""
        status = self._parser.get_status_code()
        if is_interim(status):
            self._headers = {}
        elif status == HTTPStatus.SWITCHING_PROTOCOLS:
            raise httptools.HttpParserError("no request asked for another protocol")
        else:
            self._head.set_result(Head(status, self._headers))

    def on_body(self, body: bytes) -> None:
        """Pass the piece on, or buffer it until a sink is set; called by the parser."""
        if self._sink is not None:
            self._sink(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """Resolve the end of the answer; the connection stays open if the server keeps it alive."""
        if is_interim(self._parser.get_status_code()):
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._end.set_result(None)


class Pool:
    """Connections to one server that wait for their next request."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._idle: deque[tuple[float, Upstream]] = deque()  # the last one has waited least
        self._taken: dict[Upstream, None] = {}
        self._retired = False

    async def take(self) -> Upstream:
        """Return a connection, which the caller gives back or closes. Raises Unavailable if no server listens."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, upstream = self._idle.pop()
            if upstream.is_open and now - since < IDLE_S:
                self._taken[upstream] = None
                return upstream
            upstream.close()
        try:
            upstream = await asyncio.wait_for(Upstream.connect(self.origin), CONNECT_TIMEOUT_S)
            self._taken[upstream] = None
            return upstream
        except (Unavailable, TimeoutError):
            raise Unavailable(f"no server listens at {self.origin}", code=MEMBER_LOST) from None

    def give_back(self, upstream: Upstream) -> None:
        """Close it unless it is at rest."""
        self._taken.pop(upstream, None)
        if upstream.at_rest and len(self._idle) < MAX_IDLE and not self._retired:
            self._idle.append((asyncio.get_running_loop().time(), upstream))
        else:
            upstream.close()

    def give_up(self) -> None:
        """Close all connections in use. Requests that wait for an answer fail."""
        for upstream in list(self._taken):
            upstream.close()

    def retire(self) -> None:
        """Close all idle connections, and each of the others after its request."""
        self._retired = True
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close all idle connections, and fail the requests that use the others."""
        self.give_up()
        self.retire()

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> tuple[Head, bytes]:
        """One whole answer."""
        upstream = await self.take()
        try:
            upstream.send(method, path, headers, body)
            return await upstream.head(), await upstream.whole()
        finally:
            self.give_back(upstream)

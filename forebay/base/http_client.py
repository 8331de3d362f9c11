"""A small HTTP/1.1 client for streams of server-sent events: bytes go from the socket through httptools to a callback,
without a task or a buffer per chunk."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httptools

from forebay.base.errors import ConfigError, EngineError, Unavailable

_PORTS: Final = {"http": 80, "https": 443}
DONE: Final = b"[DONE]"
_MAX_EVENT_BYTES: Final = 16 << 20
_MAX_ERROR_CHARS: Final = 500

# After 30 s of silence the kernel asks whether the other machine is there, and breaks the connection after three more.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

OnEvent = Callable[[bytes], None]


def is_interim(status: int) -> bool:
    """Return whether another answer follows this one (RFC 9110, 15.2). A 101 is the last one of HTTP."""
    return 100 <= status < 200 and status != HTTPStatus.SWITCHING_PROTOCOLS


class Origin:
    """The address of a server: `http://host:port` or `https://host`, with an optional API key."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ConfigError(f"{url!r} is not an address of a server: write http://HOST:PORT")
        self.host = parts.hostname
        self.scheme = parts.scheme
        self.port = parts.port or _PORTS[parts.scheme]
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.api_key = api_key

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


class KeptAlive(asyncio.Protocol):
    """One kept-alive connection, one request at a time. Made by `connect`."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._transport: Any = None  # uvloop's is no subclass of asyncio's

    @classmethod
    async def connect(cls, origin: Origin) -> Self:
        """Raises Unavailable if no server listens."""
        loop = asyncio.get_running_loop()
        try:
            tls = True if origin.scheme == "https" else None
            _, protocol = await loop.create_connection(lambda: cls(origin), origin.host, origin.port, ssl=tls)
        except OSError as error:
            raise Unavailable(f"no server answers at {origin} ({error}): start one with `forebay serve`") from None
        return protocol

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close the transport; no-op before the connection is made."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and let the kernel notice a machine that is gone; called by asyncio."""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection(KeptAlive):
    """Answers as wholes, or their events as they come."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin)
        self.status = 0
        self._parser: Any = None
        self._answer: asyncio.Future[bytes] | None = None
        self._on_event: OnEvent | None = None
        self._body = bytearray()
        self._searched = 0  # so much of the body has no end of an event in it

    async def request(
        self, method: str, path: str, payload: dict[str, Any] | None = None, on_event: OnEvent | None = None
    ) -> bytes:
        """Send, and wait for the whole answer; its status is in `self.status`.

        With `on_event`, the data of each event of a 200 answer goes there and the returned body is empty. Raises
        EngineError where the connection breaks first.
        """
        if not self.is_open:
            raise EngineError(f"the connection to {self.origin} is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._on_event = on_event
        self._body.clear()
        self._searched = 0
        self.status = 0
        self._transport.write(encode_request(self.origin, method, path, payload))
        return await self._answer

    # asyncio's side

    def data_received(self, data: bytes) -> None:
        """Feed the HTTP parser; bytes that are not HTTP fail the pending request and close the connection."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"{self.origin} does not speak HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending request, if any; called by asyncio."""
        self._fail(f"{self.origin} closed the connection before its answer was complete")

    def _fail(self, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EngineError(message, code="connection_lost"))

    # httptools' side

    def on_status(self, status: bytes) -> None:
        """Store the status code; called by the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Append to the body and pass complete events on; fail if the rest exceeds `_MAX_EVENT_BYTES`."""
        self._body += body
        if self._on_event is not None and self.status == 200:
            self._split_events(self._on_event)
        if len(self._body) > _MAX_EVENT_BYTES:
            self._fail(f"an answer of more than {_MAX_EVENT_BYTES} bytes")
            self.close()

    def _split_events(self, on_event: OnEvent) -> None:
        body, start = self._body, 0
        at = max(0, self._searched - 1)  # of two line ends the first may have been the last byte
        while (end := body.find(b"\n\n", at)) >= 0:
            event = bytes(body[start:end])
            if event.startswith(b"data: "):
                on_event(event[6:])
            start = at = end + 2
        del body[:start]
        self._searched = len(body)

    def on_message_complete(self) -> None:
        """Resolve the pending request with the body; called by the parser."""
        if is_interim(self.status):
            return
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(bytes(self._body))


def encode_request(origin: Origin, method: str, path: str, payload: dict[str, Any] | None = None) -> bytes:
    """Return an HTTP/1.1 request as bytes, with `payload` as its JSON body and the origin's API key."""
    body = b"" if payload is None else json.dumps(payload, separators=(",", ":")).encode()
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1", f"Host: {origin.authority}"]
    if origin.api_key:
        lines.append(f"Authorization: Bearer {origin.api_key}")
    if payload is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_text(status: int, body: bytes) -> str:
    """Return the message of a server's error answer, in one line."""
    try:
        error = json.loads(body.decode())["error"]
        return f"{status} {error.get('code') or error.get('type')}: {error['message']}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{status}: {body[:200].decode(errors='replace')}"


async def get_json(origin: Origin, path: str) -> dict[str, Any]:
    """One GET on a connection of its own. Raises EngineError for any status but 200."""
    return await _exchange(origin, "GET", path)


async def post_json(origin: Origin, path: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Send a POST with a JSON body and return the answer, as `get_json` does."""
    return await _exchange(origin, "POST", path, payload)


async def _exchange(origin: Origin, method: str, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    connection = await Connection.connect(origin)
    try:
        body = await connection.request(method, path, payload)
    finally:
        connection.close()
    if connection.status != 200:
        raise EngineError(f"{origin}{path} answered {error_text(connection.status, body)}")
    return _object(origin, body)


def _object(origin: Origin, data: bytes) -> dict[str, Any]:
    """Parse a server's answer as a JSON object. Raises EngineError for anything else."""
    try:
        value = json.loads(data.decode())  # of bytes it would guess the encoding, UTF-16 and -32 among them
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"{origin} sent an answer that is no JSON object: {data[:200].decode(errors='replace')!a}")
    return value


def _stream_error(error: Any) -> EngineError:
    """An error inside a stream."""
    if not isinstance(error, dict):
        return EngineError(str(error)[:_MAX_ERROR_CHARS])
    return EngineError(str(error.get("message"))[:_MAX_ERROR_CHARS], code=str(error.get("code"))[:_MAX_ERROR_CHARS])


async def stream_json(origin: Origin, path: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """POST, and yield the events of the answer up to `[DONE]`. Raises EngineError for an error answer or event."""
    connection = await Connection.connect(origin)
    events: asyncio.Queue[bytes] = asyncio.Queue()
    answer = asyncio.create_task(connection.request("POST", path, payload, events.put_nowait))
    answer.add_done_callback(lambda _: events.put_nowait(DONE))
    try:
        while (data := await events.get()) != DONE:
            event = _object(origin, data)
            if "error" in event:
                raise _stream_error(event["error"])
            yield event
        body = await answer
        if connection.status != 200:
            raise EngineError(error_text(connection.status, body))
    finally:
        connection.close()
        answer.cancel()

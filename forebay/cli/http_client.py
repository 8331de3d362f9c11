"""A small HTTP/1.1 client for streams of server-sent events: bytes go from the socket through httptools to a callback,
without a task or a buffer per chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from forebay.base.errors import ConfigError, EngineError, Unavailable

DONE: Final = b"[DONE]"
_MAX_EVENT_BYTES: Final = 16 << 20

OnEvent = Callable[[bytes], None]


class Origin:
    """Where a server is: `http://host:port`, with an optional API key."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is not an address of a server: write http://HOST:PORT")
        self.host = parts.hostname
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.api_key = api_key

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}{self.prefix}"


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request at a time. Made by `connect`."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.status = 0
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._on_event: OnEvent | None = None
        self._body = bytearray()

    @classmethod
    async def connect(cls, origin: Origin) -> Connection:
        """Raises Unavailable where nobody listens."""
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(lambda: cls(origin), origin.host, origin.port)
        except OSError as error:
            raise Unavailable(f"no server answers at {origin} ({error}): start one with `forebay serve`") from None
        return protocol

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def request(
        self, method: str, path: str, payload: dict[str, Any] | None = None, on_event: OnEvent | None = None
    ) -> bytes:
        """Send, and wait for the whole answer; its status is in `self.status`.

        With `on_event`, the data of each event of a 200 answer goes there and the returned body is empty. Raises
        EngineError where the connection breaks first.
        """
        if self._transport is None or self._transport.is_closing():
            raise EngineError(f"the connection to {self.origin} is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._on_event = on_event
        self._body.clear()
        self.status = 0
        self._transport.write(encode_request(self.origin, method, path, payload))
        return await self._answer

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport) or hasattr(transport, "write"):
            self._transport = transport  # type: ignore[assignment]  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"{self.origin} does not speak HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"{self.origin} closed the connection before its answer was complete")

    def _fail(self, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EngineError(message, code="connection_lost"))

    # httptools' side

    def on_status(self, status: bytes) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._on_event is not None and self.status == 200:
            self._split_events(self._on_event)
        if len(self._body) > _MAX_EVENT_BYTES:
            self._fail(f"an answer of more than {_MAX_EVENT_BYTES} bytes")
            self.close()

    def _split_events(self, on_event: OnEvent) -> None:
        *events, rest = bytes(self._body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                on_event(event[6:])
        self._body[:] = rest

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(bytes(self._body))


def encode_request(origin: Origin, method: str, path: str, payload: dict[str, Any] | None = None) -> bytes:
    body = b"" if payload is None else json.dumps(payload, separators=(",", ":")).encode()
    lines = [f"{method} {origin.prefix}{path} HTTP/1.1", f"Host: {origin.host}:{origin.port}"]
    if origin.api_key:
        lines.append(f"Authorization: Bearer {origin.api_key}")
    if payload is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_text(status: int, body: bytes) -> str:
    """What a server's error answer says, in one line."""
    try:
        error = json.loads(body)["error"]
        return f"{status} {error.get('code') or error.get('type')}: {error['message']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{status}: {body[:200].decode(errors='replace')}"


async def get_json(origin: Origin, path: str) -> dict[str, Any]:
    """One GET on a connection of its own. Raises EngineError for any status but 200."""
    connection = await Connection.connect(origin)
    try:
        body = await connection.request("GET", path)
    finally:
        connection.close()
    if connection.status != 200:
        raise EngineError(f"{origin}{path} answered {error_text(connection.status, body)}")
    answer: dict[str, Any] = json.loads(body)
    return answer


async def stream_json(origin: Origin, path: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """POST, and yield the events of the answer up to `[DONE]`. Raises EngineError for an error answer or event."""
    connection = await Connection.connect(origin)
    events: asyncio.Queue[bytes] = asyncio.Queue()
    answer = asyncio.create_task(connection.request("POST", path, payload, events.put_nowait))
    answer.add_done_callback(lambda _: events.put_nowait(DONE))
    try:
        while (data := await events.get()) != DONE:
            event = json.loads(data)
            if "error" in event:
                raise EngineError(str(event["error"].get("message")), code=str(event["error"].get("code")))
            yield event
        body = await answer
        if connection.status != 200:
            raise EngineError(error_text(connection.status, body))
    finally:
        connection.close()
        answer.cancel()

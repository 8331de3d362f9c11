"""The application for servers that are not Forebay's: an ASGI app without `http.protocol`'s connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.http.protocol import CONNECTION, MAX_BUFFERED_BYTES

_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


class ChunkWriter:
    """A `Connection` over ASGI's `send`: chunks are written in their order by a task, and before what `send` sends."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending = bytearray()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of the body. Return False if the reader is gone or more than 1 MiB behind."""
        if self._task is not None and self._task.done() and self._task.exception() is not None:
            return False
        if len(self._pending) + len(data) > MAX_BUFFERED_BYTES:
            return False
        self._pending += data
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush())
        return True

    async def send(self, message: Message) -> None:
        """Send one of ASGI's messages after the chunks."""
        await self._flush()
        await self._send(message)

    async def _flush(self) -> None:
        async with self._lock:
            while self._pending:
                data = bytes(self._pending)
                self._pending.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": True})


def embedded(app: ASGIApp, close: Callable[[], Awaitable[None]]) -> ASGIApp:
    """Return `app` for any ASGI server. `close` is called when that shuts down."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send, close)
            return
        writer = ChunkWriter(send)
        extensions = {**(scope.get("extensions") or {}), CONNECTION: writer}
        await app({**scope, "extensions": extensions}, receive, writer.send)

    return run


async def _lifespan(receive: Receive, send: Send, close: Callable[[], Awaitable[None]]) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await close()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def status_of(app: ASGIApp, path: str) -> int:
    """Return the status of a GET of `path`, as this machine would get it."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        "client": None,
        "server": None,
    }
    found = HTTPStatus.INTERNAL_SERVER_ERROR.value

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal found
        if message["type"] == "http.response.start":
            found = message["status"]

    await app(scope, receive, send)
    return found

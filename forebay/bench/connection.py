"""Connections that cost next to nothing per token, for a load that shares its machine with the server it measures.

What arrives of a stream is kept with its time, and read when the load is over: until then a read costs the clock and a
look at its last bytes. Heads, and answers that are no streams, go through the parser as they come.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httptools

from forebay.base.http_client import KeptAlive, Origin

# The end of a chunked body. Events are lines of JSON, which have no line ends of their own: these bytes are no content.
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"

Read = tuple[float, bytes]


@dataclass(slots=True)
class Answer:
    """The answer to one request; times in seconds of one monotonic clock. `failure` says why it is not whole."""

    sent: float
    ended: float = 0.0
    reads: list[Read] = field(default_factory=list)
    failure: str = ""


@dataclass(slots=True)
class Reading:
    """An answer, parsed: the status, the events of a stream with the time of the read that completed each, and the body
    of an answer that is no stream. Made by `read_answer`."""

    status: int = 0
    complete: bool = False
    streams: bool = False
    events: list[Read] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)


class _Parser:
    """httptools' callbacks for one answer. Raises HttpParserError for bytes that are not HTTP."""

    def __init__(self) -> None:
        self.reading = Reading()
        self._parser: Any = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> Reading:
        self._parser.feed_data(data)
        return self.reading

    def on_status(self, status: bytes) -> None:
        self.reading.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"transfer-encoding" and value.lower() == b"chunked":
            self.reading.streams = self.reading.status == 200

    def on_body(self, body: bytes) -> None:
        self.reading.body += body

    def on_message_complete(self) -> None:
        self.reading.complete = True


def read_answer(answer: Answer) -> Reading:
    """Raises HttpParserError for bytes that are not HTTP."""
    parser = _Parser()
    reading = parser.reading
    for at, data in answer.reads:
        parser.feed(data)
        if reading.streams:
            *events, unfinished = bytes(reading.body).replace(b"\r\n", b"\n").split(b"\n\n")
            reading.events += [(at, event[6:]) for event in events if event.startswith(b"data: ")]
            reading.body[:] = unfinished
    return reading


class LoadConnection(KeptAlive):
    """A kept-alive connection that notes when each read came and parses nothing until the answer has ended."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin)
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer]
        self._parser: _Parser | None = None  # None while a stream is under way

    async def exchange(self, request: bytes) -> Answer:
        """Send, and wait for the whole answer, or for what ended it early."""
        self._done = asyncio.get_running_loop().create_future()
        self._parser = _Parser()
        self._answer = Answer(time.perf_counter())
        if not self.is_open:
            self._end("the connection was closed before the request was sent")
        else:
            self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        """Note the time of a read, and end the answer if it is the last one."""
        answer = self._answer
        if answer is None:
            return  # nobody has asked: a server that says why it closes
        answer.reads.append((time.perf_counter(), data))
        if self._parser is not None:
            self._parse(self._parser, data)
        elif data.endswith(_LAST_CHUNK) or (len(data) < len(_LAST_CHUNK) and _ends(answer.reads)):
            self._end()

    def _parse(self, parser: _Parser, data: bytes) -> None:
        try:
            reading = parser.feed(data)
        except httptools.HttpParserError as error:
            self._end(f"this is not HTTP: {error}")
            self.close()
            return
        if reading.complete:
            self._end()
        elif reading.streams:
            self._parser = None

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer under way as incomplete."""
        self._end("the server closed the connection before its answer was complete")

    def _end(self, failure: str = "") -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.ended = time.perf_counter()
            answer.failure = failure
            if not self._done.done():  # else the load was given up
                self._done.set_result(answer)


def _ends(reads: list[Read]) -> bool:
    """Return whether the last reads together end with `_LAST_CHUNK`: they may have been cut inside it."""
    tail = b""
    for _, data in reversed(reads):
        tail = data + tail
        if len(tail) >= len(_LAST_CHUNK):
            break
    return tail.endswith(_LAST_CHUNK)

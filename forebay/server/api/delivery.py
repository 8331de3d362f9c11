"""How answers go out: collected and sent whole, or written event by event as they come."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.base.errors import ForebayError
from forebay.engine.choice import Choice, Piece, weights_changed
from forebay.engine.scores import Scored
from forebay.server.api.dialect import Dialect
from forebay.server.api.generation import Generation
from forebay.server.context import ServerContext
from forebay.server.http.bodies import ClientGone
from forebay.server.http.errors import internal
from forebay.server.http.protocol import Connection
from forebay.text.answers.parts import Part, Said

INLINE_SCORES: Final = 1024  # log-probabilities; to write that many takes about a millisecond


class Collector:
    """A `Sink` for an answer that is sent whole."""

    def __init__(self, num_choices: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(num_choices)]
        self.parts: list[list[Part]] = [[] for _ in range(num_choices)]
        self.scores: list[list[Scored]] = [[] for _ in range(num_choices)]

    def text(self, choice: Choice, text: str) -> None:
        self.texts[choice.index].append(text)
        if choice.prompt.reading is not None:
            self.parts[choice.index].append(Said(text))

    def piece(self, choice: Choice, piece: Piece) -> None:
        self.texts[choice.index].append(piece.text)
        self.parts[choice.index] += piece.parts
        self.scores[choice.index] += piece.tokens

    def restart(self, choice: Choice) -> None:
        self.texts[choice.index].clear()
        self.parts[choice.index].clear()
        self.scores[choice.index].clear()


async def collect(server: ServerContext, dialect: Dialect, generation: Generation) -> bytes:
    collected = Collector(len(generation.choices))
    generation.deliver(collected)
    await generation.ended()
    if generation.disconnected:
        raise ClientGone
    texts = list(map("".join, collected.texts))
    whole = partial(dialect.whole, generation, texts, collected.parts, collected.scores)
    return whole() if generation.num_scores <= INLINE_SCORES else await server.json_workers.run(whole)


class EventWriter:
    """A `Sink` that writes a stream of events: one write per update, in the turn of the loop in which it arrives. What
    comes before `open` is kept until then."""

    def __init__(self, connection: Connection, dialect: Dialect, generation: Generation) -> None:
        self.media_type = dialect.media_type
        self._connection = connection
        self._dialect = dialect
        self._generation = generation
        self._kept: list[bytes] | None = []
        self._has_begun = False

    def text(self, choice: Choice, text: str) -> None:
        self._write(self._dialect.text(choice, text))

    def piece(self, choice: Choice, piece: Piece) -> None:
        if not self._has_begun:  # what is nothing but text is never the first
            self._has_begun = True
            self._write(self._dialect.opening(self._generation))
        self._write(self._dialect.chunk(choice, piece))

    def restart(self, choice: Choice) -> None:
        raise weights_changed(choice.num_tokens)

    def open(self) -> None:
        """Call when the head of the answer has been sent."""
        kept, self._kept = self._kept or [], None
        self._write(b"".join(kept))

    async def end(self) -> bytes:
        """Wait until nothing more is to be written; what is left to be said then."""
        try:
            await self._generation.ended()
            return self._dialect.closing(self._generation)
        except ForebayError as error:
            return self._dialect.failure(error)
        except Exception as error:
            return self._dialect.failure(internal(error, "stream"))

    def _write(self, events: bytes) -> None:
        if self._kept is not None:
            self._kept.append(events)
        elif events and not self._connection.write_chunk(events):
            self._generation.disconnect()


class EventStream(Response):
    """The answer that `writer` writes. Owns `undo`, which ends the generation. `send` is the connection's own."""

    def __init__(self, send: Send, writer: EventWriter, undo: contextlib.AsyncExitStack) -> None:
        super().__init__(headers={"content-type": writer.media_type, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._send = send
        self._writer = writer
        self._undo = undo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._undo:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._writer.open()
            ending = await self._writer.end()
            await self._send({"type": "http.response.body", "body": ending, "more_body": False})

"""Answers on their way out: the interface of dialects, the chunks of choices that chats and completions share, and how
answers are sent, whole or event by event.

Chunks are put together as bytes around parts that are encoded once per request."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, TypedDict

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.base.errors import ForebayError
from forebay.engine.client.choice import Choice, Piece, weights_changed
from forebay.engine.client.scores import Scored
from forebay.http.errors import DONE, error_ending, internal
from forebay.http.lifecycle import ClientGone
from forebay.http.protocol import Connection
from forebay.server.api.core.generation import Generation
from forebay.server.api.core.logprobs import RankedLogprob, prompt_logprobs
from forebay.server.context import ServerContext
from forebay.text.answers.parts import Part, Said
from forebay.text.token_bytes import TokenBytes


class Dialect(ABC):
    """One shape of answers, whole and in a stream of events. Made for one request; nothing is validated per token."""

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"  # of a stream
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"  # an event without effect; b"" if the protocol has none

    @abstractmethod
    def whole(
        self, generation: Generation, texts: list[str], parts: list[list[Part]], scores: list[list[Scored]]
    ) -> bytes:
        """The body of an answer that is not streamed; `texts`, `parts` and `scores` by choice."""

    @abstractmethod
    def opening(self, generation: Generation) -> bytes:
        """Return the events before all pieces. The first piece is there, so the effect of the prefix cache is known."""

    @abstractmethod
    def text(self, choice: Choice, text: str) -> bytes:
        """The event of a piece that is text and nothing else."""

    @abstractmethod
    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """The events of a piece, or none."""

    @abstractmethod
    def closing(self, generation: Generation) -> bytes:
        """The end of a stream."""

    @abstractmethod
    def failure(self, error: ForebayError) -> bytes:
        """The end of a stream that failed, whose status has been sent."""


encode: Final = msgspec.json.Encoder().encode


class Fields(TypedDict):
    """The fields before `choices`, but for `object`, which each kind of answer has its own value of."""

    id: str
    object: str
    created: int
    model: str


@dataclass(kw_only=True)
class ChunkDialect(Dialect):
    """The fields around `choices`, and events that are put together around them. `addition` is what an event calls that
    which it adds to a choice.

    `fields` are those before `choices`. With `usage_of_each` every event says what came so far; `num_prompt_top` is
    None where no log-probabilities of the prompt are wanted. With `token_ids` the answer has those of the prompt and of
    each choice."""

    addition: ClassVar[bytes]

    event_object: ClassVar[str]  # of a stream

    fields: Fields
    table: TokenBytes
    include_usage: bool
    usage_of_each: bool = False
    num_prompt_top: int | None = None
    token_ids: bool = False
    _running: Generation | None = None  # where each event tells its usage
    _num_ids: dict[int, int] = field(default_factory=dict)  # of a stream, by choice: token ids that were sent

    def __post_init__(self) -> None:
        self._start = b"data: " + encode({**self.fields, "object": self.event_object})[:-1] + b',"choices":['
        self._before = self._start + b'{"index":'
        self._after = b'}],"usage":null}\n\n' if self.include_usage else b"}]}\n\n"

    def prompt_scores_of(self, choice: Choice) -> list[dict[str, RankedLogprob] | None] | UnsetType:
        """Return the log-probabilities of the choice's prompt, or UNSET if they were not requested."""
        if self.num_prompt_top is None:
            return UNSET
        return prompt_logprobs(self.table, choice.prompt_scores(), self.num_prompt_top)

    def ids_of(self, choice: Choice) -> list[int] | UnsetType:
        """Return the token ids generated so far, or UNSET if they were not requested."""
        return choice.token_ids if self.token_ids else UNSET

    def prompt_ids_of(self, choice: Choice) -> list[int] | UnsetType:
        """Return the token ids of the choice's prompt, or UNSET if they were not requested."""
        return choice.prompt.token_ids if self.token_ids else UNSET

    def has_new_ids(self, choice: Choice) -> bool:
        """Return whether token ids were requested and some have not been sent yet."""
        return self.token_ids and self._num_ids.get(choice.index, 0) < len(choice.token_ids)

    def _new_ids(self, choice: Choice) -> bytes:
        """The field with the token ids of a choice that were not sent yet."""
        ids = choice.token_ids[self._num_ids.get(choice.index, 0) :]
        self._num_ids[choice.index] = len(choice.token_ids)
        return b',"token_ids":%b' % encode(ids)

    def closing(self, generation: Generation) -> bytes:
        if not self.include_usage:
            return DONE
        return self._start + b'],"usage":' + encode(generation.usage()) + b"}\n\n" + DONE

    def failure(self, error: ForebayError) -> bytes:
        return error_ending(error, "")

    def _event(self, choice: Choice, added: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        ids = self._new_ids(choice) if self.token_ids else b""
        after = self._after if self._running is None else b'}],"usage":%b}\n\n' % encode(self._running.usage())
        return (
            b'%b%d,"%b":%b,"logprobs":%b,"finish_reason":%b%b%b'
            % (self._before, choice.index, self.addition, added, logprobs, finish, ids, after)
        )  # fmt: skip


INLINE_SCORES: Final = 1024  # log-probabilities; to write that many takes about a millisecond


class Collector:
    """A `Sink` for an answer that is sent whole."""

    def __init__(self, num_choices: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(num_choices)]
        self.parts: list[list[Part]] = [[] for _ in range(num_choices)]
        self.scores: list[list[Scored]] = [[] for _ in range(num_choices)]

    def text(self, choice: Choice, text: str) -> None:
        """Append a piece of the choice that is text and nothing else."""
        self.texts[choice.index].append(text)
        if choice.prompt.reading is not None:
            self.parts[choice.index].append(Said(text))

    def piece(self, choice: Choice, piece: Piece) -> None:
        """Append a piece of the choice: its text, parts and scored tokens."""
        self.texts[choice.index].append(piece.text)
        self.parts[choice.index] += piece.parts
        self.scores[choice.index] += piece.tokens

    def restart(self, choice: Choice) -> None:
        """Drop all that was collected of the choice: its generation begins again."""
        self.texts[choice.index].clear()
        self.parts[choice.index].clear()
        self.scores[choice.index].clear()


async def collect(server: ServerContext, dialect: Dialect, generation: Generation) -> bytes:
    """Wait for all choices to end and return the whole answer's JSON. Raises ClientGone if the client disconnects, and
    the error of a choice that fails. Many log-probabilities are encoded on a worker thread."""
    collected = Collector(len(generation.choices))
    generation.deliver(collected)
    await generation.ended()
    if generation.disconnected:
        raise ClientGone
    texts = list(map("".join, collected.texts))
    whole = partial(dialect.whole, generation, texts, collected.parts, collected.scores)
    return whole() if generation.num_scores <= INLINE_SCORES else await server.json_workers.run(server.client, whole)


KEEP_ALIVE_S: Final = 15.0  # of a stream without bytes; proxies close one after 30 to 60 s


@dataclass(slots=True)
class EventWriter:
    """A `Sink` that writes a stream of events: one write per update, in the turn of the loop in which it arrives. Until
    `finish` is called, events are kept. While none are written, events without effect keep the connection alive."""

    _connection: Connection
    dialect: Dialect
    _generation: Generation
    _kept: list[bytes] | None = field(default_factory=list)
    _has_begun: bool = False
    _has_written: bool = False  # since the last check of `_keep_alive`
    _timer: asyncio.TimerHandle | None = None

    def text(self, choice: Choice, text: str) -> None:
        """Write the event of a piece that is text and nothing else."""
        self._write(self.dialect.text(choice, text))

    def piece(self, choice: Choice, piece: Piece) -> None:
        """Write the events of a piece; the first one is preceded by the stream's opening."""
        if not self._has_begun:  # what is nothing but text is never the first
            self._has_begun = True
            self._write(self.dialect.opening(self._generation))
        self._write(self.dialect.chunk(choice, piece))

    def restart(self, choice: Choice) -> None:
        """Raise `weights_changed`: tokens that were sent cannot be taken back."""
        raise weights_changed(choice.num_tokens)

    async def begun(self) -> None:
        """Wait for the first piece, for as long as the stream may be silent. Raises what ended the generation: its
        status has not been sent yet."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S if self.dialect.keep_alive else None):
                await self._generation.begun()
        except TimeoutError:
            self._write(self.dialect.keep_alive)

    async def finish(self) -> bytes:
        """Write the kept events and all later ones, and return the end of the body. Call once the head is sent."""
        kept, self._kept = self._kept or [], None
        self._write(b"".join(kept))
        self._watch()
        try:
            await self._generation.ended()
            return self.dialect.closing(self._generation)
        except ForebayError as error:
            return self.dialect.failure(error)
        except Exception as error:
            return self.dialect.failure(internal(error, "stream"))
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _keep_alive(self) -> None:
        """Write an event without effect if nothing was written since the last check: no two bytes are `KEEP_ALIVE_S`
        apart."""
        if not self._has_written:
            self._write(self.dialect.keep_alive)
        self._watch()

    def _watch(self) -> None:
        """Check later whether anything was written, if the protocol has an event without effect."""
        self._has_written = False
        if self.dialect.keep_alive:
            self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S / 2, self._keep_alive)

    def _write(self, events: bytes) -> None:
        if self._kept is not None:
            self._kept.append(events)
        elif events:
            self._has_written = True
            if not self._connection.write_chunk(events):
                self._generation.disconnect()


class EventStream(Response):
    """The answer that `writer` writes. Owns `undo`, which ends the generation. `send` is the connection's own."""

    def __init__(self, send: Send, writer: EventWriter, undo: contextlib.AsyncExitStack) -> None:
        super().__init__(headers={"content-type": writer.dialect.media_type, "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._send = send
        self._writer = writer
        self._undo = undo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._undo:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            ending = await self._writer.finish()
            await self._send({"type": "http.response.body", "body": ending, "more_body": False})

"""Server-sent events, both sides: any text comes through whole, and no answer makes our clients do more than raise a
typed error."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httptools
import pytest

from forebay.base import http_client
from forebay.base.errors import ForebayError
from forebay.base.http_client import Connection, Origin, stream_json
from forebay.bench.connection import Answer, read_answer
from forebay.engine.client.choice import Choice, Piece, Prompt
from forebay.requests.sampling_params import SamplingParams
from forebay.server.api.core.generation import Generation, Order
from forebay.server.api.openai.chat import ChatDialect
from forebay.server.api.openai.completions import CompletionDialect
from tests.fuzz.mutants import fuzz, mutated, outcome, pieces, seeds
from tests.text.tiny_tokenizer import tiny_tokenizer

ORIGIN = Origin("http://127.0.0.1:1")
TABLE = tiny_tokenizer(600).table
TEXTS = [
    "hello world",
    'data: [DONE]\n\n{"a": "\\u0000"}',
    "é🎉日本\u2028\u2029\u0085\r\n\r\n",
    "\0\x1b[0m</s>",
    "data: data: ",
]


def chunked(parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def whole(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"hello"},"finish_reason":null}]}\n\n'
ERROR = b'{"error":{"message":"no","type":"server_error","param":null,"code":"engine_dead"}}'
ANSWERS = [
    chunked([EVENT, EVENT + EVENT, b"data: [DONE]\n\n"]),
    chunked([b": ping\n\n", b"data: {}\n\n", b"data: []\n\n", b"data: [DONE]\n\n"]),
    chunked([EVENT, b"data: " + ERROR + b"\n\n", b"data: [DONE]\n\n"]),
    whole(ERROR, 503),
    whole(b"<html>", 502),
    whole(EVENT),
    b"HTTP/1.1 204 No Content\r\n\r\n",
]


class Line:
    """A transport whose other end has written already."""

    def __init__(self, connection: Connection, parts: list[bytes]) -> None:
        self._connection, self._parts, self._closing = connection, parts, False

    def write(self, data: bytes) -> None:
        for part in self._parts:
            if not self._closing:
                self._connection.data_received(part)
        self._connection.connection_lost(None)

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True


def joined(parts: list[bytes]) -> Connection:
    connection = Connection(ORIGIN)
    connection.connection_made(Line(connection, parts))  # type: ignore[arg-type]
    return connection


@pytest.fixture
def loop() -> Any:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def ask(loop: asyncio.AbstractEventLoop, parts: list[bytes]) -> tuple[list[bytes], Any]:
    """The events of an answer that arrives in those parts, and its body or the error's text."""
    events: list[bytes] = []

    def run() -> tuple[int, bytes]:
        connection = joined(parts)
        body = loop.run_until_complete(connection.request("POST", "/x", {}, events.append))
        return connection.status, body

    got = outcome(ForebayError, run)
    return events, got.message if isinstance(got, ForebayError) else got


def make_answer(rng: random.Random) -> list[bytes]:
    data = mutated(rng, ANSWERS)
    return [data, *pieces(rng, data)]


@pytest.mark.parametrize("seed", seeds(1, 60))
def test_d7_an_answer_reads_the_same_however_it_is_cut(seed: int, loop: asyncio.AbstractEventLoop) -> None:
    def check(case: list[bytes]) -> None:
        data, *cut = case
        once = ask(loop, [data])
        assert ask(loop, cut) == once
        assert ask(loop, [data[i : i + 1] for i in range(len(data))]) == once

    fuzz(seed, 150, make_answer, check)


@pytest.mark.parametrize("seed", seeds(1, 60))
def test_d7_what_a_stream_says_is_an_object_or_a_typed_error(
    seed: int, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(case: list[bytes]) -> None:
        async def connect(origin: Origin) -> Connection:
            return joined(case[1:])

        async def run() -> list[Any]:
            return [event async for event in stream_json(ORIGIN, "/x", {})]

        monkeypatch.setattr(http_client.Connection, "connect", connect)
        got = outcome(ForebayError, lambda: loop.run_until_complete(run()))
        assert isinstance(got, ForebayError) or all(isinstance(event, dict) for event in got)

    fuzz(seed, 150, make_answer, check)


@pytest.mark.parametrize("seed", seeds(1, 60))
def test_d7_the_load_generator_reads_the_same_however_it_is_cut(seed: int) -> None:
    def read(parts: list[bytes]) -> Any:
        try:
            reading = read_answer(Answer(0.0, reads=[(0.0, part) for part in parts]))
        except httptools.HttpParserError:
            return None
        return reading.status, reading.complete, [data for _, data in reading.events], bytes(reading.body)

    def check(case: list[bytes]) -> None:
        data, *cut = case
        assert read(cut) == read([data]) == read([data[i : i + 1] for i in range(len(data))])

    fuzz(seed, 150, make_answer, check)


# -- what we write, read by the rules of the format ----------------------------------------------------------------


def events_of(stream: bytes) -> list[str]:
    """By the standard's rules: lines end with CR, LF or both, an empty one ends an event."""
    lines = stream.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert lines[-2:] == ["", ""]
    assert all(line.startswith("data: ") or not line for line in lines)
    return [line.removeprefix("data: ") for line in lines if line]


def make_text(rng: random.Random) -> tuple[int, list[str]]:
    text = mutated(rng, TEXTS).encode("utf-8", "replace").decode()
    return rng.randrange(1 << 30), [part for part in pieces(rng, text) if part] or ["x"]


def written(kind: type[Any], parts: list[str]) -> list[bytes]:
    options = {"logprobs": False} if kind is ChatDialect else {"num_top": None, "echo": False, "whole_table": TABLE}
    fields = {"id": "id-1", "object": "", "created": 7, "model": 'mo"del\n'}
    dialect = kind(fields=fields, table=TABLE, include_usage=True, **options)
    order = Order(params=SamplingParams(), namespace="", author="")
    choice = Choice(0, Prompt(token_ids=[5]), None, order.params, TABLE)  # type: ignore[arg-type]
    first, *middle = parts
    generation = Generation([choice], 1, TABLE, order)
    chunks = [dialect.opening(generation), dialect.chunk(choice, Piece(first, [], None))]
    chunks += [dialect.text(choice, part) for part in middle]
    chunks.append(dialect.chunk(choice, Piece("", [], "stop")))
    return [*chunks, dialect.closing(generation)]


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


@pytest.mark.parametrize("kind", [ChatDialect, CompletionDialect])
@pytest.mark.parametrize("seed", seeds(1, 30))
def test_c7_d7_any_text_comes_through_both_sides(seed: int, kind: type[Any], loop: asyncio.AbstractEventLoop) -> None:
    def check(case: tuple[int, list[str]]) -> None:
        cuts, parts = random.Random(case[0]), case[1]
        chunks = written(kind, parts)
        *events, done = events_of(b"".join(chunks))
        assert done == "[DONE]"
        values = [json.loads(event) for event in events]
        assert "".join(map(text_of, values)) == "".join(parts)
        assert [choice["finish_reason"] for value in values for choice in value["choices"]].count("stop") == 1
        assert values[-1]["choices"] == []
        assert values[-1]["usage"]["prompt_tokens"] == 1
        got, (status, body) = ask(loop, pieces(cuts, chunked(chunks)))
        assert (status, body) == (200, b"")
        assert [event.decode() for event in got] == [*events, done]

    fuzz(seed, 150, make_text, check)


class Counting(bytearray):
    """Counts the bytes that are looked through."""

    seen = 0

    def find(self, what: Any, start: int = 0, *more: int) -> int:  # type: ignore[override]
        Counting.seen += len(self) - start
        return super().find(what, start, *more)

    def __bytes__(self) -> bytes:
        Counting.seen += len(self)
        return bytes(memoryview(self))


def looked_through(size: int) -> int:
    """Bytes that are looked through while an event of `size` bytes arrives a few at a time."""
    connection = Connection(ORIGIN)
    connection._body = Counting()
    connection.status = 200
    connection._on_event = lambda event: None
    Counting.seen = 0
    for _ in range(size // 16):
        connection.on_body(b"x" * 16)
    return Counting.seen


def test_d7_a_long_event_in_small_parts_is_looked_through_once() -> None:
    looked_through(1000)
    assert looked_through(100_000) <= 2.5 * looked_through(50_000)

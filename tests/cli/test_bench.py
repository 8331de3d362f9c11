"""The figures of a benchmark against sums done by hand, and its client against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import ConfigError, EngineError
from forebay.base.http_client import Connection, Origin, stream_json
from forebay.bench.connection import Answer, LoadConnection
from forebay.bench.load import Load, Target, Timed, run_load, send, to_sample
from forebay.bench.metrics import Sample, summarize
from forebay.bench.prompts import CHAT, COMPLETIONS, Text, conversations, random_prompts
from forebay.cli import bench

USAGE = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}'
TOKEN = b'{"choices":[{"text":"x"}],"usage":null}'
REFUSED = b'HTTP/1.1 429 x\r\ncontent-length: 55\r\n\r\n{"error":{"code":"queue_full","message":"again later"}}'
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_an_address_may_be_behind_tls() -> None:
    assert str(Origin("https://models.example.org/v1")) == "https://models.example.org:443"


def test_figures_are_the_fields_own_definitions() -> None:
    samples = [
        Sample(sent=1.0, arrivals=[1.1, 1.3, 1.4], ended=1.5, num_prompt_tokens=10, num_output_tokens=4),
        Sample(sent=1.0, arrivals=[1.3], ended=1.3, num_prompt_tokens=10, num_output_tokens=1),
        Sample(sent=1.0, error="500"),
    ]
    figures = summarize(samples, seconds=2.0).as_dict()
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["output_throughput"] == pytest.approx(5 / 2)
    assert figures["total_token_throughput"] == pytest.approx(25 / 2)
    assert figures["mean_ttft_ms"] == pytest.approx((100 + 300) / 2)
    assert figures["mean_tpot_ms"] == pytest.approx(100)  # (1.4 - 1.1) / 3 tokens; one token has none
    assert figures["median_itl_ms"] == pytest.approx(150)
    assert figures["p99_e2el_ms"] == pytest.approx(300 + 0.99 * 200)


def test_percentiles_goodput_and_the_peak_are_of_what_was_asked_for() -> None:
    samples = [
        Sample(sent=0.0, arrivals=[0.1, 0.2], ended=1.0, num_output_tokens=2),
        Sample(sent=0.5, arrivals=[1.0, 1.1], ended=1.5, num_output_tokens=2),
        Sample(sent=1.0, arrivals=[1.1], ended=2.0, num_output_tokens=1),
        Sample(sent=1.2, ended=1.3, error="500"),
    ]
    figures = summarize(samples, 2.0, limits_ms={"ttft": 200, "tpot": 150}, percentiles=(0.0, 50.0))
    assert figures.as_dict()["request_goodput"] == 1.0  # the first and the third, in two seconds
    assert figures.as_dict()["p0_ttft_ms"] == pytest.approx(100)
    assert figures.as_dict()["max_concurrent_requests"] == 3
    titles = [title for title, _ in figures.rows(("tpot",))]
    assert [title for title in titles if title.endswith("(ms):")] == [
        "Mean TPOT (ms):", "Median TPOT (ms):", "P0 TPOT (ms):", "P50 TPOT (ms):",
    ]  # fmt: skip
    assert "request_goodput" not in summarize(samples, 2.0).as_dict()


def test_figures_of_nothing_are_zero() -> None:
    assert summarize([], seconds=1.0).as_dict()["p99_ttft_ms"] == 0.0


def test_prompts_are_exact_seeded_and_share_their_prefix() -> None:
    def draw(seed: int) -> list[list[int]]:
        return random_prompts(count=3, length=20, prefix_length=5, vocab_size=1000, seed=seed)

    prompts = draw(7)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(256 <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts == draw(7) != draw(8)


def test_lengths_may_be_drawn_between_two_bounds() -> None:
    prompts = random_prompts(count=200, length=10, max_length=14, prefix_length=0, vocab_size=1000, seed=1)
    assert {len(prompt) for prompt in prompts} == {10, 11, 12, 13, 14}


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix of 30"):
        random_prompts(count=1, length=20, prefix_length=30, vocab_size=1000, seed=0)


def test_conversations_are_questions_and_the_answers_they_had(tmp_path: Path) -> None:
    def said(*values: str) -> dict[str, object]:
        return {"conversations": [{"from": "x", "value": value} for value in values]}

    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([said("a", "b", "c"), said("alone"), said(" ", "b"), said("d", " e ")]))
    assert sorted(conversations(path, 2, seed=0)) == [("a", "b"), ("d", "e")]
    with pytest.raises(ConfigError, match="2 conversations with an answer, and 3 are asked for"):
        conversations(path, 3, seed=0)
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="no list of conversations"):
        conversations(path, 1, seed=0)


def chunked(*events: bytes, pieces: int = 1) -> bytes:
    """An answer; each event cut into `pieces` chunks of the transfer."""
    out = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    for event in events:
        data = b"data: " + event + b"\n\n"
        step = -(-len(data) // pieces)
        for start in range(0, len(data), step):
            part = data[start : start + step]
            out += f"{len(part):x}\r\n".encode() + part + b"\r\n"
    return out + b"0\r\n\r\n"


def answer(*replies: bytes, close: bool = False) -> Handler:
    """A server that gives each request of a connection the next reply."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
            await reader.readexactly(length)
            writer.write(reply)
        if close:
            return
        await reader.read()

    return handle


def against(handler: Handler, body: Callable[[Origin], Awaitable[Any]]) -> Any:
    """Run `body` with the address of a server that has `handler`; every connection is closed before this returns."""
    ended: list[asyncio.Task[None]] = []

    async def run() -> Any:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ended.append(asyncio.create_task(serve(reader, writer)))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError):  # the client asks no more
                await handler(reader, writer)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await body(Origin(f"http://127.0.0.1:{port}"))
        finally:
            server.close()
            await asyncio.gather(*ended)
            await server.wait_closed()

    return asyncio.run(run())


def load(count: int, concurrency: int) -> Load:
    return Load([[1, 2, 3, 4]] * count, float("inf"), concurrency, 0)


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_a_stream_is_counted_however_it_is_cut(pieces: int) -> None:
    reply = chunked(TOKEN, TOKEN, TOKEN, USAGE, b"[DONE]", pieces=pieces)

    async def body(origin: Origin) -> list[Sample]:
        return (await run_load(Target(origin, "m", 3, True), load(4, 2), lambda: None)).samples

    samples = against(answer(reply, reply, reply, reply), body)
    assert [(len(s.arrivals), s.num_prompt_tokens, s.num_output_tokens, s.error) for s in samples] == [
        (3, 4, 3, "")
    ] * 4
    assert all(s.sent < s.arrivals[0] <= s.arrivals[-1] <= s.ended for s in samples)


def test_texts_are_chats_on_a_chat_route_and_prompts_elsewhere() -> None:
    def sent(route: str) -> dict[str, Any]:
        target = Target(Origin("http://x:1"), "m", 3, True, route)
        sent: dict[str, Any] = json.loads(target.request(Text("hi", 7)).partition(b"\r\n\r\n")[2])
        return sent

    assert sent(CHAT)["messages"] == [{"role": "user", "content": "hi"}]
    assert (sent(COMPLETIONS)["prompt"], sent(CHAT)["max_tokens"]) == ("hi", 7)


def test_the_answers_of_a_dataset_are_counted_by_the_server(tmp_path: Path) -> None:
    said = {"conversations": [{"value": "a"}, {"value": "b"}]}
    (tmp_path / "dataset").write_text(json.dumps([said, said]))
    own = SimpleNamespace(
        dataset_path=tmp_path / "dataset", num_prompts=1, num_warmups=1, seed=0, sharegpt_output_len=None
    )

    def texts(reply: bytes) -> Any:
        return against(answer(reply), lambda origin: bench._texts(own, origin, "m"))

    assert texts(b'HTTP/1.1 200 x\r\ncontent-length: 11\r\n\r\n{"count":3}') == [("a", 3), ("a", 3)]
    with pytest.raises(EngineError, match="counts no tokens: give --sharegpt-output-len"):
        texts(b"HTTP/1.1 200 x\r\ncontent-length: 2\r\n\r\n{}")
    with pytest.raises(EngineError, match="again later; give --sharegpt-output-len"):
        texts(REFUSED)


# Other servers end a stream with a choice that has a reason and no text, with usage beside it, or without any usage.
REASON = b'{"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":3}}'
WHOSE_TURN = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
SAID = b'{"choices":[{"delta":{"content":"x"},"finish_reason":null}]}'
CHAT_REASON = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'
HALF_A_CHARACTER = b'{"choices":[{"text":"","finish_reason":null}]}'


@pytest.mark.parametrize(
    ("events", "num_arrivals", "num_tokens"),
    [
        ((TOKEN, TOKEN, TOKEN, REASON, b"[DONE]"), 3, 3),
        ((TOKEN, HALF_A_CHARACTER, TOKEN, b"[DONE]"), 3, 3),
        ((TOKEN, USAGE), 1, 3),
        ((WHOSE_TURN, SAID, SAID, CHAT_REASON, b"[DONE]"), 2, 2),
        ((TOKEN, b"\r\n\r\n: a comment", TOKEN), 2, 2),
    ],
)
def test_streams_of_other_servers_are_counted(events: tuple[bytes, ...], num_arrivals: int, num_tokens: int) -> None:
    sample = to_sample(Answer(0.0, 2.0, [(1.0, chunked(*events))]))
    assert (len(sample.arrivals), sample.num_output_tokens, sample.error) == (num_arrivals, num_tokens, "")


@pytest.mark.parametrize("cut", range(-8, 0))
def test_the_end_of_a_stream_is_seen_wherever_it_is_cut(cut: int) -> None:
    reply = chunked(TOKEN, USAGE, b"[DONE]")

    async def body(origin: Origin) -> Answer:
        connection = await LoadConnection.connect(origin)
        exchange = asyncio.create_task(connection.exchange(b"GET / HTTP/1.1\r\n\r\n"))
        await asyncio.sleep(0)
        for part in (reply[:cut], *(reply[i : i + 1 or None] for i in range(cut, 0))):
            assert not exchange.done()
            connection.data_received(part)
        answer = await exchange
        connection.close()
        return answer

    sample = to_sample(against(answer(), body))
    assert (len(sample.arrivals), sample.num_output_tokens, sample.error) == (1, 3, "")


@pytest.mark.parametrize(
    ("reply", "close", "words"),
    [
        (REFUSED, False, "queue_full"),
        (chunked(TOKEN, b'{"error":{"message":"lost"}}', b"[DONE]"), False, "lost"),
        (chunked(TOKEN)[:-5], True, "closed the connection"),
        (b"SMTP hello\r\n\r\n", False, "HTTP"),
    ],
)  # fmt: skip
def test_a_failed_request_is_a_sample_with_an_error(reply: bytes, close: bool, words: str) -> None:
    async def body(origin: Origin) -> Sample:
        return (await run_load(Target(origin, "m", 3, False), load(1, 1), lambda: None)).samples[0]

    assert words in against(answer(reply, close=close), body).error


def test_a_stream_of_objects_ends_at_done_and_raises_what_the_server_says() -> None:
    async def texts(origin: Origin) -> list[str]:
        return [event["choices"][0]["text"] async for event in stream_json(origin, "/v1/completions", {})]

    assert against(answer(chunked(TOKEN, TOKEN, b"[DONE]")), texts) == ["x", "x"]
    with pytest.raises(EngineError, match="lost"):
        against(answer(chunked(TOKEN, b'{"error":{"message":"lost"}}', b"[DONE]")), texts)


def test_a_key_is_sent_as_a_bearer_token() -> None:
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await reader.read()

    async def body(origin: Origin) -> bytes:
        connection = await Connection.connect(Origin(str(origin), "secret-key"))
        answer = await connection.request("GET", "/v1/models")
        connection.close()
        return answer

    assert against(handle, body) == b"{}"
    assert b"Authorization: Bearer secret-key\r\n" in seen[0]


@pytest.mark.parametrize("url", ["http://", "ftp://host:1"])
def test_an_address_that_cannot_be_reached_this_way_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Origin(url)


def test_send_times_each_event_of_one_request_and_reports_its_status() -> None:
    def sent(*replies: bytes) -> Timed:
        async def body(origin: Origin) -> Timed:
            return await send(origin, COMPLETIONS, {"prompt": "x", "stream": True})

        return against(answer(*replies), body)

    timed = sent(chunked(TOKEN, TOKEN, USAGE, b"[DONE]"))
    assert (timed.status, timed.failure, len(timed.arrivals)) == (200, "", 3)
    assert timed.sent <= timed.arrivals[0] <= timed.arrivals[-1] <= timed.ended
    refused = sent(REFUSED)
    assert (refused.status, refused.arrivals) == (429, [])

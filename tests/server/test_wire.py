"""The bytes of a stream, exactly, and how they leave."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from forebay.http.protocol import _BoundedHttpProtocol
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, Update
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

ESCAPES = 'a "quote", a \\, a line\n, \x01 and 🎉'


def speak(prompt: list[int], params: SamplingParams) -> list[int]:
    """A byte per token: characters of several bytes come in parts."""
    return [3 + byte for byte in ESCAPES.encode()]


def request(path: str, **body: Any) -> bytes:
    content = json.dumps({"stream": True, "max_tokens": 500, "ignore_eos": False, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: r1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def exchange(server: Running, sent: bytes) -> tuple[bytes, list[bytes]]:
    """The head of the answer, and the chunks of its body."""
    with server.connect() as sock:
        sock.sendall(sent)
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            block = sock.recv(1 << 16)
            assert block, received
            received += block
    head, _, rest = received.partition(b"\r\n\r\n")
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return head, [chunk for chunk in chunks if chunk]


def events(created: int, *choices: str, kind: str, answer_id: str, usage: str = "") -> bytes:
    start = f'data: {{"id":"{answer_id}","object":"{kind}","created":{created},"model":"tiny","choices":[{{"index":0,'
    return b"".join(f"{start}{choice}}}]{usage}}}\n\n".encode() for choice in choices)


def created_in(chunks: list[bytes]) -> int:
    created: int = json.loads(chunks[0].split(b"\n\n")[0].removeprefix(b"data: "))["created"]
    return created


def texts() -> list[str]:
    """What each token shows: whole characters, the last byte of a part brings all of it."""
    return [json.dumps(character, ensure_ascii=False) for character in ESCAPES]


def test_a_chat_streams_these_bytes(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(speak))
    head, chunks = exchange(server, request("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]))
    assert head.lower().startswith(b"http/1.1 200 ok\r\n")
    assert b"content-type: text/event-stream; charset=utf-8\r\n" in head.lower() + b"\r\n"
    end = '"logprobs":null,"finish_reason":null'
    expected = events(
        created_in(chunks),
        f'"delta":{{"role":"assistant"}},{end}',
        *(f'"delta":{{"content":{text}}},{end}' for text in texts()),
        '"delta":{},"logprobs":null,"finish_reason":"stop"',
        kind="chat.completion.chunk",
        answer_id="chatcmpl-r1",
    )
    assert b"".join(chunks) == expected + b"data: [DONE]\n\n"


def test_a_completion_streams_these_bytes(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(speak))
    asked = request("/v1/completions", prompt="hi", stream_options={"include_usage": True})
    chunks = exchange(server, asked)[1]
    *told, last = b"".join(chunks).split(b"data: [DONE]\n\n")[0].split(b"\n\n")[:-1]
    expected = events(
        created_in(chunks),
        *(f'"text":{text},"logprobs":null,"finish_reason":null' for text in texts()),
        '"text":"","logprobs":null,"finish_reason":"stop"',
        kind="text_completion",
        answer_id="cmpl-r1",
        usage=',"usage":null',
    )
    assert b"".join(event + b"\n\n" for event in told) == expected
    usage = json.loads(last.removeprefix(b"data: "))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ESCAPES.encode()) + 1


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every chunk of a stream that any connection writes, in order."""
    written: list[bytes] = []
    write = _BoundedHttpProtocol.write_chunk

    def counted(self: _BoundedHttpProtocol, data: bytes) -> bool:
        written.append(data)
        return write(self, data)

    monkeypatch.setattr(_BoundedHttpProtocol, "write_chunk", counted)
    return written


def test_each_event_is_one_chunk_and_one_write(launch: Callable[..., Running], writes: list[bytes]) -> None:
    server = launch(lambda: FakeEngine(speak))
    chunks = exchange(server, request("/v1/completions", prompt="hi"))[1]
    assert len(writes) == len(ESCAPES) + 1  # a character each, and the reason
    assert chunks == [*writes, b"data: [DONE]\n\n"]


def test_all_that_a_step_brings_is_written_when_it_returns(launch: Callable[..., Running], writes: list[bytes]) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    socks = [server.connect() for _ in range(8)]
    for sock in socks:
        sock.sendall(request("/v1/completions", prompt="hi", seed=1))
    server.until(lambda: len(server.engine.running) == len(socks))
    server.call(server.engine.step)  # their first tokens: the heads go out
    for sock in socks:
        read_past(sock, b'"finish_reason":null}]}\n\n')

    def step() -> int:
        before = len(writes)
        server.engine.step()
        return len(writes) - before

    assert server.call(step) == len(socks)
    for sock in socks:
        sock.close()


def read_past(sock: socket.socket, end: bytes) -> None:
    seen = b""
    while end not in seen:
        block = sock.recv(1 << 16)
        assert block, seen
        seen += block


def test_pipelined_streams_come_one_after_the_other(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(speak))
    asked = request("/v1/completions", prompt="hi")
    with server.connect() as sock:
        sock.sendall(asked + asked)
        received = b""
        while received.count(b"\r\n0\r\n\r\n") < 2:
            received += sock.recv(1 << 16)
    first, second = received.split(b"\r\n0\r\n\r\n")[:2]
    for answer in (first, second):
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"data: ") == len(ESCAPES) + 2


def test_a_fault_of_ours_in_a_stream_ends_it_with_a_typed_event(
    launch: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    with server.connect() as sock:
        # With some seeds the first token is a part of a character, and no event is written yet.
        sock.sendall(request("/v1/completions", prompt="hi", seed=1))
        server.until(lambda: len(server.engine.running) == 1)
        server.call(server.engine.step)
        read_past(sock, b'"finish_reason":null}]}\n\n')
        stream = server.engine.submitted[0]
        broken = Update(stream.request_id, [10**9], finish=FinishReason.LENGTH)
        monkeypatch.setattr("forebay.text.detokenizer.Detokenizer.push", None)
        server.call(stream.put, broken)
        read_past(sock, b'"code":"internal_error"}}\n\ndata: [DONE]\n\n')
    server.until(lambda: not server.engine.running)
    with server.client() as http:
        assert http.get("/debug/state").json()["server"]["num_inside"] == 0

"""The application without `http.protocol`'s connections: what Ray Serve runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from forebay.base.errors import ConfigError, Unavailable
from forebay.cluster import serve_app
from forebay.cluster.ingress import ChunkWriter, embedded, status_of
from forebay.cluster.serve_app import Ingress
from forebay.http.protocol import CONNECTION, MAX_BUFFERED_BYTES


class Sent:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, message: Message) -> None:
        await self.open.wait()
        self.messages.append(message)


async def nothing() -> None:
    return


async def test_chunks_are_sent_in_order_and_before_what_follows() -> None:
    sent = Sent()
    writer = ChunkWriter(sent)
    assert writer.write_chunk(b"a")
    await asyncio.sleep(0)
    assert writer.write_chunk(b"b")
    await writer.send({"type": "http.response.body", "body": b"c", "more_body": False})
    assert b"".join(message["body"] for message in sent.messages) == b"abc"
    assert [message["more_body"] for message in sent.messages][-1] is False


async def test_reader_that_is_too_slow_is_cut_off() -> None:
    sent = Sent()
    sent.open.clear()
    writer = ChunkWriter(sent)
    half = bytes(MAX_BUFFERED_BYTES // 2)
    assert writer.write_chunk(half)
    await asyncio.sleep(0)  # the task has taken the first one
    assert writer.write_chunk(half)
    assert writer.write_chunk(half)
    assert not writer.write_chunk(b"x")
    sent.open.set()
    await writer.send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_reader_that_is_gone_is_noticed() -> None:
    async def gone(message: Message) -> None:
        raise ConnectionError

    writer = ChunkWriter(gone)
    assert writer.write_chunk(b"x")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not writer.write_chunk(b"y")


async def test_application_has_a_connection_and_is_closed_with_the_server() -> None:
    closed: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(scope["extensions"][CONNECTION], ChunkWriter)
        await send({"type": "http.response.start", "status": 204 if scope["path"] == "/health" else 404})
        await send({"type": "http.response.body", "body": b""})

    async def close() -> None:
        closed.append(True)

    found = embedded(app, close)
    assert await status_of(found, "/health") == 204
    assert await status_of(found, "/other") == 404
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent = Sent()

    async def receive() -> Message:
        return next(messages)

    await found({"type": "lifespan"}, receive, sent)
    assert [message["type"] for message in sent.messages] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert closed == [True]


async def test_health_of_a_replica_is_that_of_its_route() -> None:
    status = 200

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"] == "/health"
        await send({"type": "http.response.start", "status": status})

    replica = Ingress([])
    await replica.check_health()  # it still starts
    replica._app = embedded(app, nothing)
    await replica.check_health()
    status = 503
    with pytest.raises(Unavailable, match="/health answered 503"):
        await replica.check_health()


def test_serve_app_refuses_keys_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    class Serve:
        serve: Any = None

    monkeypatch.setitem(sys.modules, "ray", Serve)
    with pytest.raises(ConfigError, match="use a file") as refused:
        serve_app(["--api-key=sk-canary-0123456789"])
    assert "canary" not in refused.value.message
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[serve\]'"):
        serve_app([])

"""Clients that go away before their request has reached the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from forebay.server.api import serving
from forebay.server.http.workers import TextWorkers
from tests.deadlines import HANGS_S, wait_until

BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(BODY)).encode()
    + b"\r\n\r\n"
    + BODY
)


def test_c27_of_a_client_that_leaves_while_its_text_is_tokenized_the_engine_hears_nothing(
    launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, watches = threading.Event(), threading.Event(), []
    run = TextWorkers.run

    async def slow(self: TextWorkers, *args: Any, **options: Any) -> Any:
        begun.set()
        assert await asyncio.to_thread(go_on.wait, HANGS_S)
        return await run(self, *args, **options)

    class Watch(serving.Watch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watches.append(self)

    monkeypatch.setattr(TextWorkers, "run", slow)
    monkeypatch.setattr(serving, "Watch", Watch)
    server = launch()
    with server.connect() as sock:
        sock.sendall(REQUEST)
        assert begun.wait(HANGS_S)
    server.until(lambda: watches and watches[0].gone)
    go_on.set()
    with server.client() as http:
        wait_until(lambda: http.get("/debug/state").json()["server"]["num_inside"] == 0)
    assert server.engine.submitted == []

"""Clients that go away before their request has reached the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from forebay.http import workers
from forebay.http.preparation import Client, Lane, staying_client
from forebay.http.workers import TextWorkers
from forebay.server import gateway
from tests.deadlines import HANGS_S, wait_until
from tests.server.fake_engine import FakeEngine

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

    class Watch(gateway.Watch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watches.append(self)

    monkeypatch.setattr(TextWorkers, "run", slow)
    monkeypatch.setattr(gateway, "Watch", Watch)
    server = launch()
    with server.connect() as sock:
        sock.sendall(REQUEST)
        assert begun.wait(HANGS_S)
    server.until(lambda: watches and watches[0].gone)
    go_on.set()
    with server.client() as http:
        wait_until(lambda: http.get("/debug/state").json()["server"]["num_inside"] == 0)
    assert server.engine.submitted == []


LONG = "word " * 1000  # so that it is tokenized beside the event loop
SAID = {"messages": [{"role": "user", "content": LONG}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", SAID),
        ("/tokenize", {"prompt": LONG}),
        ("/v1/messages/count_tokens", SAID),
    ],
)
def test_c27_client_that_leaves_while_it_waits_for_a_turn_leaves_its_request_on_every_route(
    path: str, body: dict[str, Any], launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All routes share one queue: what a route asks for is given up with its client."""
    waits, ran = threading.Event(), []
    turn = Lane.turn

    async def never(self: Lane, client: Client) -> Any:
        busy = [
            await turn(self, staying_client()),
            await turn(self, Client(gateway.Watch(client.watch.receive), "another")),
        ]
        waits.set()
        try:
            return await turn(self, client)
        finally:
            ran.append(client.watch.gone)
            for each in busy:
                each.end()

    monkeypatch.setattr(Lane, "turn", never)
    content = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    monkeypatch.setattr(workers, "NUM_THREADS", 1)
    server = launch(tenants={"another": 1})
    with server.connect() as sock:
        sock.sendall(head.encode() + f"content-length: {len(content)}\r\n\r\n".encode() + content)
        assert waits.wait(HANGS_S)
    server.until(lambda: ran == [True])
    assert server.engine.submitted == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_while_its_answer_is_generated_is_counted_and_logged(
    stream: bool, launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "forebay")
    server = launch(lambda: FakeEngine(manual=True))
    with server.connect() as sock:
        body = json.dumps({"prompt": "hello", "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        server.until(lambda: len(server.engine.submitted) == 1)
    server.until(lambda: server.engine.aborted == [1])
    with server.client() as http:
        wait_until(lambda: http.get("/debug/state").json()["server"]["num_inside"] == 0)
        metrics = http.get("/metrics").text
    counted = [line for line in metrics.splitlines() if line.startswith("forebay:num_aborted_requests_total")]
    assert [line.rpartition(" ")[2] for line in counted] == ["1.0"]
    (finished,) = [line for line in caplog.messages if line.startswith("finished ")]
    assert " finish=disconnect " in finished

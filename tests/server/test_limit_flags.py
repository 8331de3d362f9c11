"""Every limit of the server is what its flag says: each is set off its default, lower and higher where it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from forebay.base.clock import TICK_S
from forebay.base.loop_clock import LoopClock
from forebay.config.server_args import FLAGS, LIMITS
from forebay.http.protocol import protocol_class
from tests.server.conftest import CONFIG, Running

Launch = Callable[..., Running]
TIMES = {"header_timeout": 11.5, "body_timeout": 12.5, "keep_alive": 13.5, "write_timeout": 14.5}
HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n"


def _headers(count: int, size: int = 1) -> dict[str, Any]:
    return {"headers": {f"x-{i}": "x" * size for i in range(count)}}


def _prompt(prompt: Any, **body: Any) -> dict[str, Any]:
    return {"json": {"prompt": prompt, "max_tokens": 1, **body}}


# Flag: a value, a request that passes with it and one that does not, and the status of the latter.
ASKED: list[tuple[str, int, dict[str, Any], dict[str, Any], int]] = [
    ("max_body_bytes", 2000, _prompt("x" * 1000), _prompt("x" * 3000), 413),
    ("max_body_bytes", 8 << 20, _prompt("x " * (2 << 20)), _prompt("x " * (5 << 20)), 413),
    ("max_header_bytes", 2000, _headers(1, 1000), _headers(1, 3000), 431),
    ("max_header_bytes", 30_000, _headers(2, 10_000), _headers(3, 12_000), 431),
    ("max_headers", 20, _headers(9), _headers(30), 431),
    ("max_headers", 100, _headers(80), _headers(110), 431),
    ("max_n", 2, _prompt("hello", n=2), _prompt("hello", n=3), 400),
    ("max_n", 12, _prompt("hello", n=12), _prompt("hello", n=13), 400),
    ("max_prompts", 3, _prompt(["hello"] * 3), _prompt(["hello"] * 4), 400),
    ("max_prompts", 20, _prompt(["hello"] * 20), _prompt([[5]] * 21), 400),
]


def test_every_limit_is_tried_here() -> None:
    tried = (
        {name for name, *_ in ASKED} | set(TIMES) | {"max_connections", "max_stream_chunks", "responses_store_bytes"}
    )
    tried |= {"max_image_bytes", "limit_mm_per_prompt"}  # in `tests/server/images`
    assert tried == {flag.name for flag in FLAGS if flag.group == LIMITS}


@pytest.mark.parametrize(("name", "value", "passing", "refused", "status"), ASKED)
def test_a_request_at_the_limit_passes_and_one_above_it_does_not(
    launch: Launch, name: str, value: int, passing: dict[str, Any], refused: dict[str, Any], status: int
) -> None:
    server = launch(**{name: value})
    with server.client() as http:
        answers = [
            http.post("/v1/completions", **request) if "json" in request else http.get("/v1/models", **request)
            for request in (passing, refused)
        ]
    # Of a long prompt the context has no room, which is another refusal.
    assert answers[0].status_code == 200 or answers[0].json()["error"]["code"] == "context_length_exceeded"
    assert answers[1].status_code == status, answers[1].text
    error = answers[1].json()["error"]
    assert str(value) in error["message"]
    assert status != 400 or f"--{name.replace('_', '-')}" in error["message"]


class Recording(asyncio.SelectorEventLoop):
    """Remembers for how long each timer was set."""

    delays: list[float]

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        self.delays.append(delay)
        return super().call_later(delay, callback, *args, context=context)


class Sink:
    """A transport that takes everything."""

    def __init__(self) -> None:
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.aborted = True

    abort = close


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _connections(count: int, **changes: Any) -> tuple[list[Any], list[Sink]]:
    """Connections without a network, as one server would make them."""
    config = uvicorn.Config(_app, log_config=None, access_log=False, lifespan="off")
    config.load()
    kind, loop = protocol_class(replace(CONFIG, **changes), LoopClock()), asyncio.get_running_loop()
    made, sinks = [], [Sink() for _ in range(count)]
    for sink in sinks:
        made.append(kind(config=config, server_state=ServerState(), app_state={}, _loop=loop))
        made[-1].connection_made(sink)  # type: ignore[arg-type]
    return made, sinks


def test_every_deadline_is_as_long_as_its_flag_says() -> None:
    async def scene() -> list[float]:
        (made,), _ = _connections(1, **{f"{name}_s": seconds for name, seconds in TIMES.items()})
        made.data_received(HEAD)
        made.data_received(b"x")
        while made.cycle is None or not made.cycle.response_complete:
            await asyncio.sleep(0)
        made.pause_writing()
        delays = asyncio.get_running_loop().delays  # type: ignore[attr-defined]
        made.connection_lost(None)
        return [delay for delay in delays if delay != TICK_S]

    loop = Recording()
    loop.delays = []
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(scene()) == list(TIMES.values())


@pytest.mark.parametrize("chunks", [3, 300])
def test_a_slow_reader_is_cut_after_as_many_chunks_as_the_flag_says(
    chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> int:
        (made,), (sink,) = _connections(1, max_stream_chunks=chunks)
        made.pause_writing()
        taken = 0
        while made.write_chunk(b"x"):
            taken += 1
        assert sink.aborted
        made.connection_lost(None)
        return taken

    assert asyncio.run(scene()) == chunks
    assert [line.partition("=")[0] for line in caplog.messages] == ["slow_reader_cut buffered_bytes"]


@pytest.mark.parametrize("limit", [3, 1100])
def test_a_house_is_full_at_as_many_working_connections_as_the_flag_says(limit: int) -> None:
    async def scene() -> list[bool]:
        made, _ = _connections(limit, max_connections=limit)
        for connection in made:
            made[0].room.work(connection)
        kind = type(made[0])
        late = kind(config=made[0].config, server_state=ServerState(), app_state={}, _loop=made[0].loop)
        late.connection_made(Sink())
        full = [connection.over_cap for connection in (*made, late)]
        for connection in (*made, late):
            connection.connection_lost(None)
        return full

    assert asyncio.run(scene()) == [False] * limit + [True]

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import uvloop

from forebay.http.listen import bind
from forebay.server.serve import serve
from forebay.server.served_model import ServedModel
from forebay.text.tokenizer import Tokenizer
from tests import loopback
from tests.deadlines import HANGS_S, POLL_S
from tests.server.fake_engine import FakeEngine
from tests.server.served import CONFIG, MODEL
from tests.text.tiny_tokenizer import tiny_tokenizer


@dataclass
class Running:
    """A server on a free loopback port, in a thread with its own loop."""

    url: str
    port: int
    engine: FakeEngine
    tokenizer: Tokenizer
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread
    failures: list[BaseException]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` in the server's loop and return what it returns."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(HANGS_S)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true in the server's loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(POLL_S)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(HANGS_S)

    def client(self, **options: Any) -> httpx.Client:
        return loopback.client(base_url=self.url, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANGS_S)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it ends by itself, and its loop is closed
            self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(HANGS_S)
        assert not self.thread.is_alive()


def start(
    tokenizer: Tokenizer, make_engine: Callable[[], Any], *, model: ServedModel = MODEL, **changes: Any
) -> Running:
    """`make_engine` makes the engine in the server's loop, at once or as a coroutine."""
    config = replace(CONFIG, **changes)
    sock = bind(config)
    started = threading.Event()
    box: dict[str, Any] = {}
    failures: list[BaseException] = []

    async def main() -> None:
        engine = make_engine()
        box["engine"] = await engine if inspect.isawaitable(engine) else engine
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        await serve(
            config, model, box["engine"], tokenizer, sock=sock, on_ready=lambda _: started.set(), stop=box["stop"]
        )

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    port = sock.getsockname()[1]
    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert started.wait(HANGS_S)
    if failures:  # before it was ready: a client would wait for an answer
        raise failures[0]
    return Running(
        f"http://127.0.0.1:{port}", port, box["engine"], tokenizer, box["loop"], box["stop"], thread, failures
    )


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def launch(tokenizer: Tokenizer, patience: None) -> Iterator[Callable[..., Running]]:
    """`launch(make_engine, **config)` -> a running server, ended with the test."""
    servers: list[Running] = []

    def go(make_engine: Callable[[], FakeEngine] = FakeEngine, **changes: Any) -> Running:
        servers.append(start(tokenizer, make_engine, **changes))
        return servers[-1]

    yield go
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer, patience: None) -> Iterator[Running]:
    """One server for the tests of a module that leave it as it was."""
    server = start(tokenizer, FakeEngine)
    yield server
    server.close()

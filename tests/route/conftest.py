from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import uvloop

from forebay.config.engine_config import DisaggregationMode
from forebay.http.listen import bind, listen
from forebay.route.announcement import Role
from forebay.route.app import create_app
from forebay.route.members import Members
from forebay.route.router import Router
from forebay.route.selection import Selection
from forebay.text.tokenizer import Tokenizer
from tests import loopback
from tests.deadlines import HANGS_S, POLL_S
from tests.proven import Proven
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.served import CONFIG, MODEL
from tests.text.tiny_tokenizer import tiny_tokenizer

PREFILL = replace(MODEL, mode=DisaggregationMode.PREFILL)
DECODE = replace(MODEL, mode=DisaggregationMode.DECODE)
CLUSTER_KEY = b"cluster-canary-0123456789"
PROVEN = Proven(CLUSTER_KEY)


@dataclass
class Routed:
    """A router on a free port, in a thread with its own loop, and the fakes behind it."""

    url: str
    router: Router
    prefill: list[Running]
    decode: list[Running]
    servers: list[Running]
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        return loopback.client(base_url=self.url, **options)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true in the router's loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(POLL_S)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(HANGS_S)

    def check(self) -> None:
        """Look at all members now, not when it is time again."""
        asyncio.run_coroutine_threadsafe(self.router.members.health.check_all(), self.loop).result(HANGS_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(HANGS_S)
        assert not self.thread.is_alive()
        for server in (*self.prefill, *self.decode, *self.servers):
            server.close()


def start_router(
    prefill: list[Running],
    decode: list[Running],
    servers: Sequence[Running] = (),
    *,
    selection: Selection | None = None,
    hold_s: float = 0.0,
    **changes: Any,
) -> Routed:
    config = replace(CONFIG, **{"cluster_key": CLUSTER_KEY, **changes})
    sock = bind(config)
    started = threading.Event()
    box: dict[str, Any] = {}
    key = config.api_keys[0] if config.api_keys else ""

    async def main() -> None:
        by_role = zip(Role, (servers, prefill, decode), strict=True)
        urls = {role: [server.url for server in found] for role, found in by_role}
        members = Members(urls, api_key=key, cluster_key=config.cluster_key, selection=selection, hold_s=hold_s)
        router = box["router"] = Router(config, members)
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        await members.health.check_all()  # and not every second: the tests say when

        def on_ready(url: str) -> None:
            box["url"] = url
            started.set()

        await listen(
            config, create_app(router), router.lifecycle, router, sock=sock, on_ready=on_ready, stop=box["stop"]
        )

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="router")
    thread.start()
    assert started.wait(HANGS_S)
    return Routed(box["url"], box["router"], prefill, decode, [*servers], box["loop"], box["stop"], thread)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


Route = Callable[..., Routed]


@pytest.fixture
def route(tokenizer: Tokenizer, patience: None) -> Iterator[Route]:
    """`route(prefill=2, decode=1, **config)` -> a router before so many fakes, ended with the test. With `servers=2`
    there are only so many of both roles."""
    routed: list[Routed] = []

    def go(
        prefill: int = 1,
        decode: int = 1,
        make: Callable[[], FakeEngine] = FakeEngine,
        *,
        servers: int = 0,
        selection: Selection | None = None,
        hold_s: float = 0.0,
        **changes: Any,
    ) -> Routed:
        if servers:
            prefill = decode = 0
        members = [
            [start(tokenizer, make, model=model, **{"cluster_key": CLUSTER_KEY, **changes}) for _ in range(count)]
            for model, count in ((PREFILL, prefill), (DECODE, decode), (MODEL, servers))
        ]
        routed.append(start_router(*members, selection=selection, hold_s=hold_s, **changes))
        return routed[-1]

    yield go
    for each in routed:
        each.close()

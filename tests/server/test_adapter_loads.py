"""Which load of an adapter a request asks the engine for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.engine.frames import LoadedAdapter
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine, FakeStream

LOADED = LoadedAdapter(name="support", number=7, path="support", rank=1, num_bytes=1, num_users=0, digest="")


class AdapterEngine(FakeEngine):
    """An engine with one adapter, which keeps what each request asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        return {LOADED.name: LOADED}

    def submit(self, *, adapter: str = "", adapter_number: int = 0, **given: Any) -> FakeStream:
        self.asked.append((adapter, adapter_number))
        return super().submit(adapter=adapter, adapter_number=adapter_number, **given)


@pytest.mark.parametrize(
    ("route", "body", "asked"),
    [
        ("/v1/completions", {"prompt": "a"}, [("support", 0)]),
        ("/v1/completions", {"prompt": "a", "n": 2}, [("support", 7)] * 2),
        ("/v1/completions", {"prompt": ["a", "b"]}, [("support", 7)] * 2),
        ("/v1/embeddings", {"input": "a"}, [("support", 0)]),
        ("/v1/embeddings", {"input": ["a", "b"]}, [("support", 7)] * 2),
    ],
)
def test_request_alone_takes_the_newest_load_and_several_take_the_same_one(
    launch: Callable[..., Running], route: str, body: dict[str, Any], asked: list[tuple[str, int]]
) -> None:
    server = launch(AdapterEngine)
    with server.client() as client:
        assert client.post(route, json={"model": "support", **body}).status_code == 200
    assert server.engine.asked == asked

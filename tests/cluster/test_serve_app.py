"""The application for Ray Serve, with a Serve that only writes down, and an engine that only ends."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.cluster.ingress import status_of
from forebay.cluster.serve_app import Ingress, serve_app
from forebay.cluster.surroundings import Surroundings


class Serve(ModuleType):
    """`ray.serve`: keeps the settings of a deployment and the arguments that are bound."""

    def __init__(self) -> None:
        super().__init__("ray.serve")
        self.settings: dict[str, Any] = {}

    def deployment(self, **settings: Any) -> Any:
        self.settings = settings
        return lambda made: SimpleNamespace(bind=lambda *arguments: (made, *arguments))

    def ingress(self) -> Any:
        return lambda made: made


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    ray, found = ModuleType("ray"), Serve()
    ray.serve = found
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", found)
    return found


def test_deployment_has_the_resources_and_the_options_of_the_caller(serve: Serve) -> None:
    assert serve_app(["--a"]) == (Ingress, ["--a"])
    assert serve.settings == {
        "name": "forebay", "num_replicas": 1, "max_ongoing_requests": 256,
        "ray_actor_options": {"num_cpus": 1.0, "num_gpus": 0.0},
    }  # fmt: skip
    serve_app(
        [],
        num_replicas=3,
        num_cpus=2.0,
        num_gpus=0.5,
        max_ongoing_requests=9,
        ray_actor_options={"memory": 7, "num_cpus": 4},
    )
    assert serve.settings == {
        "name": "forebay", "num_replicas": 3, "max_ongoing_requests": 9,
        "ray_actor_options": {"num_cpus": 4, "num_gpus": 0.5, "memory": 7},
    }  # fmt: skip


@pytest.mark.parametrize("word", ["--api-key", "--admin-api-key", "--api-key=a-secret", "--admin-api-key=a-secret"])
def test_key_among_the_options_is_refused_by_its_name(word: str, serve: Serve) -> None:
    with pytest.raises(ConfigError) as refused:
        serve_app(["--port=1", word])
    assert refused.value.message.startswith(f"{word.partition('=')[0]}: ")
    assert serve.settings == {}
    serve_app(["--api-key-file=/keys"])


class Closing:
    """A part of a server that notes when it is closed."""

    def __init__(self, name: str, events: list[Any]) -> None:
        self.name, self.events = name, events

    def close(self) -> None:
        self.events.append(f"close {self.name}")


async def test_replica_starts_as_forebay_serve_does_and_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Engine:
        link = SimpleNamespace(on_sleep=None, on_wake=None)

        async def ready(self) -> None:
            events.append("ready")

        async def close(self, *, drain_s: float) -> None:
            events.append(f"close engine {drain_s:g} {context.lifecycle.draining}")

    engine, server = Engine(), SimpleNamespace(log_level="warning", log_format="text")
    config = SimpleNamespace(server=server, engine="engine settings")
    tokenizer = SimpleNamespace(release_memory="release", wake="wake")
    parts = {name: Closing(name, events) for name in ("json_workers", "workers", "grammars")}
    context = SimpleNamespace(lifecycle=SimpleNamespace(draining=False), **parts)

    async def connect(*arguments: Any) -> Any:
        events.append(("connect", *arguments))
        return engine, tokenizer, "model"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    def create_context(*arguments: Any) -> Any:
        events.append(("context", *arguments))
        return context

    def note(name: str, answer: Any = None) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            events.append((name, *arguments, *named.items()))
            return answer

        return noted

    monkeypatch.setattr(
        "forebay.cluster.surroundings.wanted", lambda *of: Surroundings(niceness=of[1], oom_score_adj=0)
    )
    monkeypatch.setattr("forebay.cluster.surroundings.restore_priorities", note("restore"))
    monkeypatch.setattr("forebay.cli.serve.parse", note("parse", SimpleNamespace(resolve=lambda: config)))
    monkeypatch.setattr("forebay.base.log.setup_logging", note("logging"))
    monkeypatch.setattr("forebay.engine.lifecycle.spawn.spawn", lambda: "spawned")
    monkeypatch.setattr("forebay.engine.lifecycle.launch.configure", lambda *of: ("configured", *of))
    monkeypatch.setattr("forebay.cli.serving.connect", connect)
    monkeypatch.setattr("forebay.server.app.create_context", create_context)
    monkeypatch.setattr("forebay.server.app.create_app", note("app", app))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    replica = Ingress(("--a",))
    built = await replica.__serve_build_asgi_app__()
    assert "OMP_NUM_THREADS" not in os.environ
    assert events == [
        ("restore", Surroundings(niceness=os.getppid(), oom_score_adj=0)),
        ("parse", ["--a"]),
        ("logging", "warning", ("process", "server"), ("format", "text")),
        ("connect", config, ("configured", "spawned", "engine settings")),
        ("context", server, "model", engine, tokenizer),
        "ready",
        ("app", context),
    ]
    assert (engine.link.on_sleep, engine.link.on_wake) == ("release", "wake")
    assert await status_of(built, "/health") == 200
    await replica.check_health()

    async def receive() -> Any:
        return {"type": "lifespan.shutdown"}

    async def send(message: Any) -> None:
        events.append(message["type"])

    events.clear()
    await built({"type": "lifespan"}, receive, send)
    assert events == [
        "close engine 0 True", "close json_workers", "close workers", "close grammars", "lifespan.shutdown.complete"
    ]  # fmt: skip

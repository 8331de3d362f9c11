"""A Ray that runs nothing: it keeps what a client asks for, and answers what a test has put into it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """The base of what Ray raises for an actor or a task."""


class ActorDiedError(RayError):
    """An actor that Ray does not start again."""


class GetTimeoutError(RayError):
    """No answer yet."""


@dataclass(frozen=True)
class Strategy:
    """Either of Ray's scheduling strategies: `place` is a node's id or a placement group."""

    place: Any
    soft: bool | None = None
    placement_group_bundle_index: int | None = None


@dataclass(frozen=True)
class Future:
    """The answer of a method or a task, or what it raises."""

    result: Any


@dataclass
class Actor:
    """An actor of this name: what each method answers, or raises, and what it was called with."""

    name: str
    answers: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method, *arguments))

    def _call(self, method: str, *arguments: bytes) -> Future:
        self.calls.append((method, *arguments))
        return Future(self.answers.get(method, GetTimeoutError()))


@dataclass
class PlacementGroup:
    bundles: list[dict[str, float]]
    strategy: str
    name: str
    lifetime: str
    fits: bool
    waited_s: list[float] = field(default_factory=list)

    def wait(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return self.fits


class FakeRay(ModuleType):
    """The module `ray`, and those below it that Forebay imports. `events` has what was asked, in order."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.events: list[Any] = []
        self.found_nodes: list[dict[str, Any]] = []
        self.free: dict[str, dict[str, float]] = {}
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, PlacementGroup] = {}
        self.groups_fit = True
        self.init_error: Exception | None = None
        self.kept: dict[tuple[str, str], bytes] = {}
        self.run_task: Callable[[Strategy, bytes], Any] = lambda strategy, request: request
        self.exceptions = SimpleNamespace(
            RayError=RayError, ActorDiedError=ActorDiedError, GetTimeoutError=GetTimeoutError
        )
        self.util = self._module("util")
        self.util.get_node_ip_address = lambda: "10.0.0.7"
        self.util.list_named_actors = lambda: list(self.actors)
        self.util.placement_group = self._placement_group
        self.util.get_placement_group = self._get_placement_group
        self.util.remove_placement_group = lambda group: self.events.append(("remove", self.groups.pop(group.name)))
        strategies = self._module("util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = lambda node, *, soft: Strategy(node, soft=soft)
        strategies.PlacementGroupSchedulingStrategy = Strategy
        self._private = self._module("_private")
        self._private.worker = SimpleNamespace(print_to_stdstream=print)
        self._module("_private.state").available_resources_per_node = lambda: self.free
        self._module("_private.services").resolve_ip_for_localhost = lambda host: {"127.0.0.1": "10.0.0.7"}[host]
        self.experimental = self._module("experimental")
        kv = self.experimental.internal_kv = self._module("experimental.internal_kv")
        kv._internal_kv_put = lambda key, value, *, namespace: self.kept.update({(namespace, key): value})
        kv._internal_kv_get = lambda key, *, namespace: self.kept.get((namespace, key))
        kv._internal_kv_del = lambda key, *, namespace: self.kept.pop((namespace, key), None)

    def _module(self, name: str) -> Any:
        made = ModuleType(f"ray.{name}")
        self.modules = {**getattr(self, "modules", {"ray": self}), made.__name__: made}
        return made

    # -- the module's functions --------------------------------------------------------------------------------------

    def init(self, **settings: Any) -> None:
        self.events.append(("init", settings))
        if self.init_error is not None:
            raise self.init_error

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return self.found_nodes

    def get_actor(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        self.events.append(("kill", actor.name, no_restart))
        del self.actors[actor.name]

    def wait(self, futures: list[Future], *, num_returns: int, timeout: float) -> None:
        self.events.append(("wait", len(futures), num_returns, timeout))

    def get(self, future: Future, *, timeout: float) -> Any:
        self.events.append(("get", timeout))
        if isinstance(future.result, Exception):
            raise future.result
        return future.result

    def remote(self, made: Any) -> Any:
        """Return what has `options(...)` and then `remote(...)`, of a class or of a function."""

        def options(**settings: Any) -> Any:
            def remote(argument: bytes, *others: Any) -> Any:
                if isinstance(made, type):
                    self.events.append(("create", made, settings, (argument, *others)))
                    self.actors[settings["name"]] = Actor(settings["name"])
                    return None
                self.events.append(("task", made, settings, argument))
                try:
                    return Future(self.run_task(settings["scheduling_strategy"], argument))
                except Exception as error:
                    return Future(error)

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)

    def _placement_group(
        self, bundles: Sequence[dict[str, float]], strategy: str, *, name: str, lifetime: str
    ) -> PlacementGroup:
        self.groups[name] = PlacementGroup(list(bundles), strategy, name, lifetime, self.groups_fit)
        return self.groups[name]

    def _get_placement_group(self, name: str) -> PlacementGroup:
        if name not in self.groups:
            raise ValueError(name)
        return self.groups[name]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Ray, whether it is installed or not."""
    found = FakeRay()
    for name, module in found.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", raising=False)
    return found

"""Changes of a cluster with a Ray that only writes down what it is asked: what is started, drained and ended, when."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from forebay.base.errors import EngineError
from forebay.base.package import __version__
from forebay.cluster import changes, up
from forebay.cluster.group import Group
from forebay.cluster.messages import Facts, Phase, Spec, Start, Status, Survey
from forebay.cluster.placement import Node
from forebay.cluster.rays import Outcome
from tests.cluster.test_placement import GIB, node, spec


class Written:
    """A `Rays` without Ray. Actors whose words have `--refused` end in the phase of that name."""

    here = "10.0.0.1"

    def __init__(self, *specs: Spec) -> None:
        self.specs = {each.name: each for each in specs}
        self.events: list[str] = []
        self.unfinished: Start | None = None

    def remember_start(self, start: Start | None) -> None:
        self.unfinished = start

    def unfinished_start(self) -> Start | None:
        return self.unfinished

    def nodes(self) -> list[Node]:
        return [node(1, 8, gib=64)]

    def survey(self, nodes: Sequence[Node], request: Callable[[Node], Survey]) -> dict[str, Facts]:
        fact = Facts(
            hostname="n1", forebay=__version__, python=platform.python_version(), auth_mode="", niceness=0,
            gcs_timeout_s=0, memory_bytes=GIB, num_threads=1,
        )  # fmt: skip
        return {each.id: fact for each in nodes}

    def actors(self) -> list[str]:
        return [*self.specs]

    def create(self, made: Spec, node_id: str) -> None:
        assert made.name not in self.specs
        self.events.append(f"create {made.name}")
        self.specs[made.name] = made

    def end(self, ended: Spec) -> None:
        self.events.append(f"end {ended.name}")
        del self.specs[ended.name]

    def call_all(self, names: Sequence[str], method: str, *_: bytes, timeout_s: float = 0) -> dict[str, Outcome]:
        if method == "drain":
            self.events += [f"drain {name}" for name in names]
        return {name: Outcome(name, value=self._answer(self.specs[name], method)) for name in names}

    def _answer(self, asked: Spec, method: str) -> bytes:
        if method == "spec":
            return asked.encode()
        phase = Phase.REFUSED if "--refused" in asked.words else Phase.READY
        return Status(
            name=asked.name, role=asked.role, phase=phase, url="http://n1:1", pid=7, instance="i", weight_version="0",
            num_starts=1, why="a bad word", node_address="10.0.0.1", hostname="n1", cpus=(), notes=(),
        ).encode()  # fmt: skip


def refused(made: Spec) -> Spec:
    return msgspec.structs.replace(made, words=("--refused",))


def group_of(rays: Any) -> Group:
    return Group(rays, lambda _: None)


@pytest.fixture
def rays(monkeypatch: pytest.MonkeyPatch) -> Written:
    """The cluster to which commands connect: two servers."""
    found = Written(spec("server-1"), spec("server-2"))

    @contextlib.contextmanager
    def connected(_: str) -> Iterator[Group]:
        yield group_of(found)

    monkeypatch.setattr(changes, "connected", connected)
    monkeypatch.setattr(changes, "recall_update", lambda _: None)
    monkeypatch.setattr(changes, "remember_update", lambda *_: None)
    return found


def test_drained_servers_are_ended_after_they_have_drained(rays: Written) -> None:
    changes.scale(["1"])
    assert rays.events == ["drain server-2", "end server-2"]
    assert rays.actors() == ["server-1"]


def test_update_starts_each_new_server_before_it_drains_and_ends_the_old_one(rays: Written, home: object) -> None:
    changes.update(["org/model"])
    first = ["create server-3", "drain server-1", "end server-1"]
    assert rays.events == [*first, "create server-4", "drain server-2", "end server-2"]
    assert rays.actors() == ["server-3", "server-4"]


@pytest.mark.parametrize(("command", "word"), [(changes.update, "org/model"), (changes.scale, "3")])
def test_start_that_fails_ends_its_server_and_keeps_the_old_ones(
    command: Callable[[Sequence[str]], None], word: str, rays: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = rays.create
    monkeypatch.setattr(rays, "create", lambda made, at: create(refused(made), at))
    with pytest.raises(EngineError, match="server-3 cannot be started on n1: a bad word"):
        command([word])
    assert rays.events == ["create server-3", "end server-3"]
    assert rays.actors() == ["server-1", "server-2"]


def test_cluster_that_cannot_start_leaves_no_actor() -> None:
    rays = Written()
    router = Spec(name="router-1", role=None, words=(), needs=spec("r").needs, host="", port=1, node_address="10.0.0.1")
    servers = [spec("server-1"), refused(spec("server-2"))]
    options: Any = type("Options", (), {"needs_one_node": False, "ready_timeout_s": 9.0})
    with pytest.raises(EngineError, match="server-2 cannot be started"):
        up.start(group_of(rays), options, rays.nodes(), [router], servers)
    assert rays.actors() == []
    assert rays.unfinished is None


def test_up_that_is_cut_leaves_what_it_starts_and_a_second_up_tells_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rays = Written()
    router = Spec(name="router-1", role=None, words=(), needs=spec("r").needs, host="", port=1, node_address="10.0.0.1")
    options: Any = type("Options", (), {"needs_one_node": False, "ready_timeout_s": 9.0})
    servers = [spec("server-1"), spec("server-2")]
    seen: list[Start | None] = []
    monkeypatch.setattr(rays, "create", lambda made, at: seen.append(rays.unfinished))
    monkeypatch.setattr(rays, "call_all", lambda names, *_, **__: {name: Outcome(name, error="dead") for name in names})
    monkeypatch.setattr(Group, "wait_ready", lambda *_: {})
    up.start(group_of(rays), options, rays.nodes(), [router], servers)
    assert rays.unfinished is None
    (start,) = set(seen)
    assert start == Start(hostname=platform.node(), pid=os.getpid(), names=("server-1", "server-2", "router-1"))
    assert "has not finished: of server-1, server-2, router-1, router-1 is missing" in "".join(
        up.unfinished_lines(start, ["server-1", "server-2"])
    )
    cut = msgspec.structs.replace(start, pid=2**22 + 1)  # above the kernel's limit
    state, advice = up.unfinished_lines(cut, ["server-1"])
    assert state.endswith(
        "was cut before it had finished: of server-1, server-2, router-1, server-2, router-1 are missing"
    )
    assert advice == "end what it has started with forebay cluster down, then start again with forebay cluster up"
    assert "has not finished" in up.unfinished_lines(msgspec.structs.replace(cut, hostname="other"), [])[0]

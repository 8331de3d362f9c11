"""`forebay cluster up` and `down`: what is checked, started and ended, in which order, and what is said meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError, Unavailable
from forebay.cluster import local, up
from forebay.cluster.group import Group
from forebay.cluster.messages import Facts, Needs, Spec, Survey
from forebay.cluster.options import UpOptions, read_options, up_parser
from forebay.cluster.placement import Node
from forebay.cluster.rays import Outcome
from forebay.cluster.up import progress_of
from forebay.route.announcement import Role
from tests.cluster.test_group import Written
from tests.cluster.test_placement import GIB, node, spec
from tests.deadlines import HANGS_S, wait_until


def test_progress_of_repeats_what_is_waited_for_and_ends_with_its_block() -> None:
    lines: list[str] = []
    several = threading.Event()

    def keep(line: str) -> None:
        lines.append(line)
        if len(lines) >= 2:
            several.set()

    before = threading.active_count()
    with progress_of("server-1 to be ready", keep, every_s=0.01):
        assert several.wait(HANGS_S)
    assert threading.active_count() == before
    assert all(line.startswith("still waiting for server-1 to be ready, ") for line in lines)


def test_progress_of_says_how_long_it_has_waited_and_never_holds_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    clock = iter([100.0, 112.4])
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: next(clock, 112.4)))
    with progress_of("x", lines.append, every_s=0.01):
        [thread] = [each for each in threading.enumerate() if "report_until_done" in each.name]
        assert thread.daemon
        wait_until(lambda: bool(lines))
    assert lines[0] == "still waiting for x, 12 s so far"


def test_progress_of_says_nothing_of_a_short_wait() -> None:
    lines: list[str] = []
    with progress_of("Ray to answer", lines.append):
        pass
    assert lines == []
    assert up.PROGRESS_S == 10.0  # nobody looks at a line that stands still for longer


class Started(Written):
    """Nodes of a cluster whose servers are ready at once; `facts` differ by node."""

    def __init__(self, nodes: Sequence[Node], here: str = "10.0.0.1", **facts: object) -> None:
        super().__init__()
        self.found, self.here, self.differs = list(nodes), here, facts
        self.surveys: dict[str, Survey] = {}
        self.placed: dict[str, str] = {}
        self.waits: list[tuple[list[str], float]] = []
        self.lost: set[str] = set()

    def nodes(self) -> list[Node]:
        return self.found

    def survey(self, nodes: Sequence[Node], request: Callable[[Node], Survey]) -> dict[str, Facts]:
        self.surveys = {each.id: request(each) for each in nodes}
        found = super().survey(nodes, request)
        return {
            name: msgspec.structs.replace(
                fact, num_threads=2, memory_bytes=GIB * int(name[1]), kv_cache_bytes=(1 << 20) * int(name[1]),
                auth_mode="token", **self.differs,
            )
            for name, fact in found.items()
        }  # fmt: skip

    def create(self, made: Spec, node_id: str) -> None:
        super().create(made, node_id)
        self.placed[made.name] = node_id

    def end(self, ended: Spec) -> None:
        if ended.name in self.specs:  # as of Ray, of what is not there nothing is left to end
            super().end(ended)

    def call_all(self, names: Sequence[str], method: str, *_: bytes, timeout_s: float = 0) -> dict[str, Outcome]:
        found = super().call_all(names, method)
        return {name: Outcome(name, error="gone") if name in self.lost else found[name] for name in names}


@pytest.fixture
def run_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """Runs `up` with words on a cluster of these nodes."""

    def run(rays: Any, *words: str) -> Started:
        @contextlib.contextmanager
        def connected(address: str, *, may_start: bool) -> Iterator[Group]:
            assert (address, may_start) == ("h:1", True)
            yield Group(rays, up.report)

        waits = Group.wait_ready
        monkeypatch.setattr(up, "connected", connected)
        monkeypatch.setattr(
            Group,
            "wait_ready",
            lambda self, names, timeout_s: rays.waits.append((names, timeout_s)) or waits(self, names, 9),
        )
        up.up(["org/name", "--address=h:1", *words])
        monkeypatch.undo()
        return rays

    return run


def big(number: int, **fields: Any) -> Node:
    return node(number, 8, gib=64, **fields)


def test_up_on_one_machine_listens_on_loopback_with_a_key_of_its_own(
    run_up: Callable[..., Started], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rays = run_up(Started([big(1)]), "--replicas=2", "--ready-timeout=77")
    assert rays.events == ["create server-1", "create server-2", "create router-1"]
    assert rays.placed == {"server-1": "n1", "server-2": "n1", "router-1": ""}
    assert rays.waits == [(["router-1"], 60.0), (["server-1", "server-2"], 77.0)]
    key = str(home / ".cache/forebay/cluster/cluster.key")
    assert Path(key).exists()
    words = ("--model-path=org/name", f"--cluster-key-file={key}", "--host=127.0.0.1")
    memory_bytes = 64 * GIB - (256 << 20)
    asked = Survey(words=words, share=2, num_cpus=8, memory_bytes=memory_bytes, key_files=(), cluster_key_file=key)
    assert rays.surveys == {"n1": asked}
    server, router = rays.specs["server-1"], rays.specs["router-1"]
    assert (server.host, server.cluster_key_file, server.routers) == ("127.0.0.1", key, ("http://127.0.0.1:30000",))
    assert server.needs == Needs(num_cpus=2, memory_bytes=GIB)
    assert {f"--kv-cache-bytes={1 << 20}", "--num-threads=2"} <= {*server.words}
    assert (router.host, router.port, router.node_address) == ("127.0.0.1", 30000, "10.0.0.1")
    assert router.needs == Needs(num_cpus=0.0, memory_bytes=256 << 20)
    *_, ports, last = capsys.readouterr().out.splitlines()
    assert ports == "open ports of n1: none"
    assert last.startswith("ready at http://127.0.0.1:30000 in ")


def test_up_over_machines_has_the_routers_first_on_this_one_and_keeps_room_for_them(
    run_up: Callable[..., Started], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 32)
    nodes = [big(1), big(2), big(3)]
    nodes[2].total_cpus = 0
    rays = run_up(Started(nodes, here="10.0.0.2"), "--pd=1p1d", "--standby", f"--cluster-key-file={key}")
    assert rays.events == ["create prefill-1", "create decode-1", "create router-2", "create router-1"]
    assert {name: found.share for name, found in rays.surveys.items()} == {"n1": 1, "n2": 1, "n3": 0}
    assert [found.words[-1] for found in rays.surveys.values()] == [f"--host=10.0.0.{i}" for i in (1, 2, 3)]
    assert "--disaggregation-mode=prefill" in rays.surveys["n1"].words
    assert {name: each.node_address for name, each in rays.specs.items() if each.role is None} == {
        "router-1": "10.0.0.2", "router-2": "10.0.0.1"
    }  # fmt: skip
    server = rays.specs["decode-1"]
    assert server.routers == ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    assert (server.host, server.needs.memory_bytes) == ("", GIB)  # what the smallest node with CPUs gives
    assert [int(each.memory_bytes) for each in nodes] == [63 * GIB - (256 << 20)] * 2 + [64 * GIB]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ready at http://10.0.0.2:30000, http://10.0.0.1:30000 in ")
    assert [line for line in lines if line.startswith("open ports")] == [f"open ports of n{i}: none" for i in (1, 2, 3)]


def test_up_beside_servers_that_run_is_refused(run_up: Callable[..., Started]) -> None:
    rays = Started([big(1)])
    rays.specs = {name: spec(name) for name in ("router-1", "server-1")}
    with pytest.raises(
        ConfigError, match="router-1, server-1 run here already: use forebay cluster scale, update or down"
    ):
        run_up(rays)
    assert rays.events == []


def test_up_over_machines_without_a_key_or_with_unlike_nodes_starts_nothing(
    run_up: Callable[..., Started], tmp_path: Path
) -> None:
    rays = Started([big(1), big(2)])
    with pytest.raises(ConfigError, match="give --cluster-key-file FILE"):
        run_up(rays)
    broken = Started([big(1)], problem="there is no model")
    with pytest.raises(ConfigError, match=r"n1 .*: there is no model"):
        run_up(broken)
    assert rays.events == broken.events == []


def test_up_without_a_node_that_has_cpus_is_refused(run_up: Callable[..., Started]) -> None:
    bare = big(1)
    bare.total_cpus = 0
    with pytest.raises(Unavailable, match="no node has enough resources for a server: it needs 1 CPU") as refused:
        run_up(Started([bare]))
    assert refused.value.code == "no_room"


def test_memory_of_a_node_that_is_full_is_nothing_rather_than_less(run_up: Callable[..., Started]) -> None:
    rays = Started([node(1, 8, gib=0.1)])
    with pytest.raises(Unavailable):
        run_up(rays)
    assert rays.surveys["n1"].memory_bytes == 0


def options(*words: str) -> UpOptions:
    return read_options(up_parser().parse(["org/name", *words]))


def test_routers_are_on_the_first_nodes_where_this_machine_is_none() -> None:
    [only] = up.routers_of(options(), [big(1), big(2)], "10.0.0.9", one_machine=False)
    assert (only.name, only.node_address, only.host) == ("router-1", "10.0.0.1", "10.0.0.1")
    assert not [word for word in only.words if word.startswith("--standby")]
    [open_one] = up.routers_of(options("--host=" + ".".join("0000")), [big(1)], "10.0.0.1", one_machine=True)
    assert up.url_of(open_one) == "http://10.0.0.1:30000"
    beside, first = up.routers_of(options("--standby", "--port=5"), [big(1), big(2)], "10.0.0.1", one_machine=False)
    assert (beside.name, beside.port, beside.host) == ("router-2", 5, "10.0.0.2")
    assert (first.name, first.port) == ("router-1", 5)
    beside, first = up.routers_of(options("--standby", "--port=5"), [big(1)], "10.0.0.1", one_machine=False)
    assert (beside.host, beside.port) == ("10.0.0.1", 6)
    assert "--port=6" in beside.words
    assert "--port=5" not in beside.words
    assert "--standby=http://10.0.0.1:6" in first.words


def test_servers_have_gpus_where_they_compute_there() -> None:
    facts = {"n1": Facts(hostname="n", forebay="", python="", auth_mode="", niceness=0, gcs_timeout_s=0, num_threads=1)}
    for words, num_gpus in (((), 0.0), (("--device=cuda",), 1.0)):
        [made] = up.servers_of(options(*words), [big(1)], facts, [], one_machine=True)
        assert (made.needs.num_gpus, made.host) == (num_gpus, "127.0.0.1")


class Ends(Started):
    """A cluster to be ended."""

    def __init__(self, *names: str) -> None:
        super().__init__([big(1)])
        roles = {name: None if name.startswith("router") else Role.BOTH for name in names}
        self.specs = {name: msgspec.structs.replace(spec(name), role=role) for name, role in roles.items()}


@pytest.fixture
def run_down(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs `down` with words; returns the addresses that it connected to and the heads that it stopped."""

    def run(rays: Any, head: local.Head | None, *words: str) -> list[Any]:
        found: list[Any] = []

        @contextlib.contextmanager
        def connected(address: str) -> Iterator[Group]:
            found.append(address)
            yield Group(rays, lambda _: None)

        monkeypatch.setattr(up, "connected", connected)
        monkeypatch.setattr(local, "started", lambda: head)
        monkeypatch.setattr(local, "stop", found.append)
        up.down(words)
        return found

    return run


HEAD = local.Head(address="10.0.0.7:1", folder="/tmp/none")


def test_down_drains_servers_ends_all_and_then_own_ray(
    run_down: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rays = Ends("router-1", "server-1", "server-2")
    rays.lost = {"server-2"}
    assert run_down(rays, HEAD) == ["", HEAD]
    assert rays.events == [
        "drain server-1", "drain server-2", "end server-1", "end server-2", *(f"end {name}" for name in ("router-1",))
    ]  # fmt: skip
    assert capsys.readouterr().out == "Ray has ended\n"


def test_down_now_drains_nothing_and_another_ray_goes_on(
    run_down: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rays = Ends("router-1", "server-1")
    rays.lost = {"router-1"}
    assert run_down(rays, HEAD, "--now", "--address=h:1") == ["h:1"]
    assert rays.events == ["end router-1", "end server-1"]
    assert run_down(Ends(), None) == [""]
    assert capsys.readouterr().out == ""


def test_actor_that_does_not_answer_is_known_by_its_name_alone() -> None:
    for name, role in (("router-1", None), ("server-1", Role.BOTH), ("decode-2", Role.BOTH)):
        assert up.as_spec(name, b"") == Spec(name=name, role=role, words=(), needs=Needs(num_cpus=0), host="")
    assert up.as_spec("server-1", spec("server-1").encode()) == spec("server-1")


def test_connection_is_closed_whatever_a_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Rays:
        def __init__(self, address: str) -> None:
            events.append(address)

        def close(self) -> None:
            events.append("close")

    monkeypatch.setattr(up, "Rays", Rays)
    monkeypatch.setattr(local, "connect_address", lambda address, *, may_start: f"{address} {may_start}")
    with up.connected("a", may_start=True) as group:
        assert isinstance(group.rays, Rays)
    with pytest.raises(KeyError), up.connected("b"):
        raise KeyError
    assert events == ["a True", "close", "b False", "close"]

"""`scale` and `update`: which servers they start and drain, like which others, and what they wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.cluster import changes
from forebay.cluster.group import Group
from forebay.cluster.messages import Facts, Spec, Status, Survey, Update
from forebay.cluster.options import READY_TIMEOUT_S
from forebay.cluster.placement import Node
from forebay.cluster.rays import Outcome
from forebay.route.announcement import Role
from tests.cluster.test_group import Written
from tests.cluster.test_placement import GIB, node, spec

ROUTER = Spec(name="router-1", role=None, words=(), needs=spec("r").needs, host="", port=1, node_address="10.0.0.1")


class Nodes(Written):
    """Two nodes with room for servers, and one without CPUs."""

    def __init__(self, *specs: Spec) -> None:
        super().__init__(*specs)
        self.placed: dict[str, str] = {}
        self.surveys: list[dict[str, Survey]] = []
        self.needed = {"n1": 3 * GIB, "n2": 4 * GIB, "n3": 9 * GIB}

    def nodes(self) -> list[Node]:
        bare = node(3, 0, gib=64)
        bare.total_cpus = 0
        return [node(1, 8, gib=64), node(2, 4, gib=64), bare]

    def create(self, made: Spec, node_id: str) -> None:
        super().create(made, node_id)
        self.placed[made.name] = node_id

    def survey(self, nodes: Sequence[Node], request: Callable[[Node], Survey]) -> dict[str, Facts]:
        self.surveys.append({each.id: request(each) for each in nodes})
        found = super().survey(nodes, request)
        return {each.id: msgspec.structs.replace(found[each.id], memory_bytes=self.needed[each.id]) for each in nodes}


class Cluster:
    """What commands connect to, how, and for how long they wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rays, self.addresses, self.lines = Nodes(), list[str](), list[str]()
        self.waits: list[tuple[list[str], float]] = []
        self.updates: dict[str, Update | None] = {}
        self.updated: list[tuple[str, str, Update | None]] = []
        monkeypatch.setattr(changes, "connected", self._connected)
        monkeypatch.setattr(changes, "report", self.lines.append)
        monkeypatch.setattr(changes, "recall_update", self.updates.get)
        monkeypatch.setattr(changes, "remember_update", lambda name, update: self.updates.update({name: update}))
        monkeypatch.setattr(
            Group, "wait_ready", lambda _, names, timeout_s: self.waits.append((list(names), timeout_s))
        )
        monkeypatch.setattr(
            Group, "update_weights", lambda _, spec, path, before: self.updated.append((spec.name, path, before))
        )

    @contextlib.contextmanager
    def _connected(self, address: str) -> Iterator[Group]:
        rays: Any = self.rays
        self.addresses.append(address)
        yield Group(rays, lambda _: None)

    def run(self, specs: Sequence[Spec], command: Callable[[Sequence[str]], None], *words: str) -> list[str]:
        """Run a command on a cluster of these actors; return the events."""
        self.rays = Nodes(*specs)
        command(words)
        return self.rays.events


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_scale_starts_servers_beside_others_with_their_weights(cluster: Cluster) -> None:
    like = msgspec.structs.replace(spec("server-1"), words=("--a",), group="prefill-9")
    update = Update(path="/new", num_updates=2)
    cluster.updates["server-1"] = update
    assert cluster.run([like, ROUTER], changes.scale, "3") == ["create server-2", "create server-3"]
    assert cluster.rays.placed == {"server-2": "n2", "server-3": "n1"}  # on 10.0.0.1 there is one already
    assert cluster.rays.specs["server-3"] == msgspec.structs.replace(like, name="server-3", group="")
    assert cluster.updates == {f"server-{number}": update for number in (1, 2, 3)}
    assert cluster.waits == [(["server-2", "server-3"], READY_TIMEOUT_S)]
    assert cluster.addresses == [""]
    assert cluster.lines == ["there are as many as wanted: 3 server"]


def test_scale_of_roles_starts_some_and_drains_others(cluster: Cluster) -> None:
    there = [spec("prefill-1", Role.PREFILL), *(spec(f"decode-{i}", Role.DECODE) for i in (1, 2))]
    for each, count in zip(there, (3, 4, 5), strict=True):
        cluster.updates[each.name] = Update(path=f"/{each.name}", num_updates=count)
    words = ("2p1d", "--ready-timeout=7", "--address=h:1")
    assert cluster.run(there, changes.scale, *words) == ["create prefill-2", "drain decode-2", "end decode-2"]
    assert cluster.updates["prefill-2"] == cluster.updates["prefill-1"]
    assert cluster.waits == [(["prefill-2"], 7.0)]
    assert cluster.addresses == ["h:1"]
    assert cluster.lines == ["there are as many as wanted: 2 prefill, 1 decode"]


def test_scale_to_what_is_there_changes_nothing(cluster: Cluster) -> None:
    assert cluster.run([spec("server-1")], changes.scale, "1") == []
    assert cluster.waits == []


def test_servers_that_do_not_answer_are_on_no_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    call_all = Nodes.call_all

    def silent(self: Nodes, names: Sequence[str], method: str, *_: bytes, timeout_s: float = 0) -> dict[str, Outcome]:
        if method == "status":
            return {name: Outcome(name, error="no answer") for name in names}
        return call_all(self, names, method)

    monkeypatch.setattr(Nodes, "call_all", silent)
    cluster.run([spec("server-1")], changes.scale, "2")
    assert cluster.rays.placed == {"server-2": "n1"}  # which has more free cores


@pytest.mark.parametrize(
    ("specs", "words", "message"),
    [
        ([ROUTER], ["2"], "no server is left that another could be like"),
        ([spec("server-1")], [], "forebay cluster scale N: write how many servers there are to be, at least 1"),
        ([spec("server-1")], ["0"], "forebay cluster scale 0: write how many"),
        ([spec("server-1")], ["1p1d"], "forebay cluster scale 1p1d: write how many"),
        ([spec("decode-1", Role.DECODE)], ["2"], "write 1p1d or 2p2d"),
    ],
)
def test_scale_that_fits_no_servers_is_refused(
    specs: list[Spec], words: list[str], message: str, cluster: Cluster
) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster.run(specs, changes.scale, *words)
    assert cluster.rays.events == []


def test_more_servers_than_there_are_have_free_names_and_no_group() -> None:
    there = [msgspec.structs.replace(spec("server-3"), group="g"), spec("server-1")]
    more, fewer = changes.difference(there, {Role.BOTH: 4})
    assert [(each.name, each.group) for each in more] == [("server-4", ""), ("server-5", "")]
    assert fewer == []
    assert changes.difference(there, {Role.BOTH: 2}) == ([], [])


def test_update_asks_each_node_with_cpus_for_the_needs_of_the_new_model(cluster: Cluster) -> None:
    there = [
        msgspec.structs.replace(spec("server-1"), words=("--model-path=old", "--a")),
        msgspec.structs.replace(spec("server-2"), words=("--model-path=old", "--b"), host="127.0.0.1"),
        ROUTER,
    ]
    events = cluster.run(there, changes.update, "org/new", "--ready-timeout=8")
    assert events == [
        *("create server-3", "drain server-1", "end server-1"),
        *("create server-4", "drain server-2", "end server-2"),
    ]
    [asked] = cluster.rays.surveys  # once for each role
    words = {name: ("--model-path=org/new", "--a", f"--host=10.0.0.{name[1]}") for name in ("n1", "n2")}
    assert asked == {
        name: Survey(words=words[name], share=1, num_cpus=8, memory_bytes=64 * GIB) for name in ("n1", "n2")
    }
    renewed = cluster.rays.specs["server-4"]
    assert (renewed.words, renewed.host) == (("--model-path=org/new", "--b"), "127.0.0.1")
    assert renewed.needs == msgspec.structs.replace(there[1].needs, memory_bytes=4 * GIB)  # what the neediest node says
    assert cluster.waits == [(["server-3"], 8.0), (["server-4"], 8.0)]
    assert cluster.updates == {}  # another model has weights of its own


def test_update_of_pairs_keeps_both_of_a_pair_on_one_node(cluster: Cluster) -> None:
    there = [
        msgspec.structs.replace(spec(f"{role}-1", role), group="prefill-1") for role in (Role.PREFILL, Role.DECODE)
    ]
    rooms: list[list[str]] = []
    cluster.rays = Nodes(*there)
    rays: Any = cluster.rays
    rays.reserve_pair = lambda pair: rooms.append([each.name for each in pair])
    rays.release = rooms.append
    changes.update(["org/new"])
    assert rooms == [["prefill-2", "decode-2"], "prefill-1"]
    assert {each.group for each in rays.specs.values()} == {"prefill-2"}
    assert [len(asked) for asked in rays.surveys] == [2, 2]  # of each role
    assert rays.surveys[0]["n1"].words[-1] == "--host=10.0.0.1"


def test_update_of_weights_loads_them_in_each_server_after_another(cluster: Cluster, tmp_path: Any) -> None:
    there = [*(spec(f"prefill-{i}", Role.PREFILL) for i in (1, 2)), spec("decode-1", Role.DECODE), ROUTER]
    before = cluster.updates["decode-1"] = Update(path="/old", num_updates=1)
    assert cluster.run(there, changes.update, f"--weights={tmp_path}") == []
    path = str(tmp_path)
    assert cluster.updated == [("prefill-1", path, None), ("decode-1", path, before), ("prefill-2", path, None)]


@pytest.mark.parametrize(
    ("prefill", "decode", "units"), [(2, 1, ["p1 d1", "p2"]), (1, 2, ["p1 d1", "d2"]), (0, 1, ["d1"])]
)
def test_update_replaces_as_many_pairs_as_there_are(prefill: int, decode: int, units: list[str]) -> None:
    specs = [spec(f"d{i + 1}", Role.DECODE) for i in range(decode)] + [
        spec(f"p{i + 1}", Role.PREFILL) for i in range(prefill)
    ]
    assert [" ".join(each.name for each in unit) for unit in changes.together(specs)] == units


def test_state_of_a_router_counts_no_server() -> None:
    nodes = [node(1, 8), node(2, 8)]
    rays = Written(ROUTER, spec("server-1"))
    for name, outcome in rays.call_all(["router-1", "server-1"], "status").items():
        status = msgspec.msgpack.decode(outcome.value, type=Status)
        changes._count(status, nodes)
        assert [each.num_servers for each in nodes] == [int(name == "server-1"), 0]

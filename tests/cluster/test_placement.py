"""Nodes of servers, and what is said where there is no room."""

from __future__ import annotations

import pytest

from forebay.base.errors import Unavailable
from forebay.cluster.changes import difference, together, wanted_counts
from forebay.cluster.messages import Needs, Spec
from forebay.cluster.placement import Node, place, units_of
from forebay.cluster.up import beside_on_one_machine, url_of
from forebay.route.announcement import Role

GIB = 1 << 30


def node(number: int, cpus: float, gib: float = 8, servers: int = 0, gpus: float = 0) -> Node:
    name = f"n{number}"
    return Node(
        id=name, address=f"10.0.0.{number}", hostname=name, num_cpus=cpus, memory_bytes=gib * GIB, num_gpus=gpus,
        num_servers=servers, total_cpus=8,
    )  # fmt: skip


def spec(name: str, role: Role = Role.BOTH, *, cpus: float = 2, gpus: float = 0) -> Spec:
    needs = Needs(num_cpus=cpus, memory_bytes=2 * GIB, num_gpus=gpus)
    return Spec(name=name, role=role, words=(), needs=needs, host="", port=7, node_address="10.0.0.9")


def placed(units: list[list[Spec]], nodes: list[Node]) -> list[list[str]]:
    return [[found.id for found in chosen] for chosen in place(units, nodes)]


def test_replicas_are_spread_and_a_full_node_gets_none() -> None:
    nodes = [node(1, 4), node(2, 8), node(3, 1)]
    found = placed([[spec(f"s{i}")] for i in range(4)], nodes)
    assert sorted(name for unit in found for name in unit) == ["n1", "n1", "n2", "n2"]
    assert placed([[spec("s")]], [node(1, 8, servers=2), node(2, 2, servers=1)]) == [["n2"]]


def test_pair_is_placed_on_one_node_that_has_room_for_both() -> None:
    pairs = [spec("prefill-1", Role.PREFILL), spec("decode-1", Role.DECODE), spec("prefill-2", Role.PREFILL)]
    units = units_of(pairs, in_pairs=True)
    assert [[(each.name, each.group) for each in unit] for unit in units] == [
        [("prefill-1", "prefill-1"), ("decode-1", "prefill-1")],
        [("prefill-2", "")],
    ]
    assert placed(units, [node(1, 3), node(2, 6)]) == [["n2", "n2"], ["n1"]]
    assert placed(units_of(pairs, in_pairs=False), [node(1, 3), node(2, 4)]) == [["n2"], ["n1"], ["n2"]]


def test_no_room_is_one_line_with_needs_and_free_resources_by_node() -> None:
    with pytest.raises(Unavailable) as refused:
        place([[spec("server-1")], [spec("server-2", gpus=1)]], [node(1, 2), node(2, 1.5, 1)])
    assert refused.value.message == (
        "no node has enough resources for server-2: it needs 2 CPU, 2.0 GiB, 1 GPU; free beside the 1 before it: "
        "n1 (10.0.0.1) 0 CPU, 6.0 GiB; n2 (10.0.0.2) 1.5 CPU, 1.0 GiB"
    )


def test_memory_and_gpus_bound_a_node_as_cpus_do() -> None:
    with pytest.raises(Unavailable, match="needs 2 CPU"):
        place([[spec("s")]], [node(1, 8, gib=1)])
    assert placed([[spec("s", gpus=1)]], [node(1, 8), node(2, 8, gpus=1)]) == [["n2"]]


def test_scale_starts_servers_like_others_and_drains_the_last() -> None:
    there = [spec("server-1"), spec("server-4")]
    more, fewer = difference(there, wanted_counts("4", there))
    assert [each.name for each in more] == ["server-5", "server-6"]
    assert fewer == []
    assert [each.name for each in difference(there, {Role.BOTH: 1})[1]] == ["server-4"]


def test_update_replaces_a_pair_at_once() -> None:
    specs = [spec("prefill-1", Role.PREFILL), spec("prefill-2", Role.PREFILL), spec("decode-1", Role.DECODE)]
    assert [[each.name for each in unit] for unit in together(specs)] == [["prefill-1", "decode-1"], ["prefill-2"]]
    assert [[each.name for each in unit] for unit in together([spec("a"), spec("b")])] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:7"), ("0" + ".0" * 3, "http://10.0.0.9:7"), ("::1", "http://[::1]:7")],
)
def test_router_url_has_the_node_s_address_for_all_interfaces(host: str, url: str) -> None:
    found = Spec(
        name="router-1", role=None, words=("--port=7",), needs=Needs(num_cpus=0), host=host, port=7,
        node_address="10.0.0.9",
    )  # fmt: skip
    assert url_of(found) == url
    assert beside_on_one_machine(found).words == ("--port=8",)

"""What is asked of Ray, word for word, and what its answers become: with a Ray that runs nothing."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import msgspec
import pytest

from forebay.base.errors import Unavailable
from forebay.base.package import __version__
from forebay.cluster.messages import Facts, Needs, Spec, Survey, Update
from forebay.cluster.node import survey
from forebay.cluster.placement import Node
from forebay.cluster.rays import Outcome, Rays, place_of_actor, recall_update, remember_update
from forebay.cluster.replica import Replica
from forebay.route.announcement import Role
from tests.cluster.fake_ray import Actor, ActorDiedError, FakeRay, GetTimeoutError, RayError, Strategy, fake_ray

__all__ = ["fake_ray"]  # a fixture


def spec(name: str, role: Role | None = Role.BOTH, **fields: Any) -> Spec:
    needs = Needs(num_cpus=3.0, memory_bytes=5 << 30, num_gpus=1.0)
    return msgspec.structs.replace(Spec(name=name, role=role, words=("--a",), needs=needs, host=""), **fields)


@pytest.fixture
def rays(fake_ray: FakeRay) -> Rays:
    found = Rays("auto")
    fake_ray.events.clear()
    return found


def test_connecting_says_nothing_into_the_output_of_a_command(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", raising=False)
    found = Rays("auto")
    settings = {"address": "auto", "namespace": "forebay", "log_to_driver": False, "logging_level": "error"}
    assert fake_ray.events == [("init", settings)]
    assert os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"
    fake_ray._private.worker.print_to_stdstream("a failure of another job", file=None)
    assert capsys.readouterr().out == ""
    assert found.here == "10.0.0.7"
    found.close()
    assert fake_ray.events[-1] == "shutdown"


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_ray_that_refuses_is_a_line_with_its_address(fake_ray: FakeRay, error: type[Exception]) -> None:
    fake_ray.init_error = error("\n  wrong token \n and more")
    with pytest.raises(Unavailable, match=r"^Ray at auto cannot be used: wrong token$"):
        Rays("auto")


@pytest.mark.parametrize(
    ("family", "host", "text"), [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")]
)
def test_gcs_that_does_not_listen_is_said_before_ray_tries(
    fake_ray: FakeRay, family: socket.AddressFamily, host: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, limits = socket.create_connection, list[float]()
    monkeypatch.setattr(socket, "create_connection", lambda at, limit: limits.append(limit) or connect(at, limit))
    with socket.create_server((host, 0), family=family) as sock:
        address = f"{text}:{sock.getsockname()[1]}"
        Rays(address)
        with sock.accept()[0] as accepted:
            assert accepted.recv(1) == b""  # it was only looked for
    fake_ray.events.clear()
    with pytest.raises(Unavailable, match=r"Ray's GCS does not answer at .*servers and routers run on"):
        Rays(address)
    assert fake_ray.events == []
    assert limits == [5.0, 5.0]


@pytest.mark.parametrize("address", ["auto", "head:name", ":6379", "ray://head:1/x"])
def test_address_that_is_no_host_and_port_is_left_to_ray(
    fake_ray: FakeRay, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "create_connection")
    Rays(address)
    assert [event[1]["address"] for event in fake_ray.events] == [address]


def test_nodes_have_what_is_free_of_them_and_dead_ones_are_left_out(rays: Rays, fake_ray: FakeRay) -> None:
    def found(number: int, **fields: Any) -> dict[str, Any]:
        return {
            "Alive": True, "NodeID": f"id{number}", "NodeManagerAddress": f"10.0.0.{number}",
            "NodeManagerHostname": f"host{number}", "Resources": {"CPU": 8.0}, **fields,
        }  # fmt: skip

    fake_ray.found_nodes = [found(1), found(2, Alive=False), found(3, Resources={})]
    fake_ray.free = {"id1": {"CPU": 4.0, "memory": 2.0, "GPU": 1.0}}
    full, bare = rays.nodes()
    assert full == Node(
        id="id1", address="10.0.0.1", hostname="host1", num_cpus=4.0, memory_bytes=2.0, num_gpus=1.0, total_cpus=8.0
    )
    assert bare == Node(id="id3", address="10.0.0.3", hostname="host3", num_cpus=0.0, memory_bytes=0.0)


def test_survey_asks_each_node_itself_and_keeps_the_failure_of_one(rays: Rays, fake_ray: FakeRay) -> None:
    facts = Facts(hostname="n", forebay="1", python="3", auth_mode="token", niceness=1, gcs_timeout_s=2)

    def run_task(strategy: Strategy, request: bytes) -> bytes:
        if strategy.place == "b":
            raise RayError("Traceback (most recent call last):\n  File\nModuleNotFoundError: forebay\n")
        return msgspec.structs.replace(facts, problem=msgspec.msgpack.decode(request, type=Survey).words[0]).encode()

    fake_ray.run_task = run_task
    nodes = [
        Node(id=name, address=f"10.0.0.{name}", hostname=f"host-{name}", num_cpus=1, memory_bytes=1) for name in "ab"
    ]
    found = rays.survey(nodes, lambda node: Survey(words=(node.id,), share=1, num_cpus=1, memory_bytes=1))
    assert found == {
        "a": msgspec.structs.replace(facts, problem="a"),
        "b": Facts(
            hostname="host-b", forebay=__version__, python=platform.python_version(), auth_mode="", niceness=0,
            gcs_timeout_s=0, problem="forebay cannot be used there: ModuleNotFoundError: forebay",
        ),
    }  # fmt: skip
    tasks = [event for event in fake_ray.events if event[0] == "task"]
    assert [(made, settings) for _, made, settings, _ in tasks] == [
        (survey, {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": Strategy(name, soft=False)}) for name in "ab"
    ]
    assert [event for event in fake_ray.events if event[0] == "get"] == [("get", 120.0)] * 2
    assert [event[0] for event in fake_ray.events] == ["task", "task", "get", "get"]  # all at once


def test_actors_are_in_the_order_of_their_numbers(rays: Rays, fake_ray: FakeRay) -> None:
    fake_ray.actors = {name: Actor(name) for name in ("server-10", "odd", "server-2", "router-1", "odd-x")}
    assert rays.actors() == ["odd", "odd-x", "router-1", "server-2", "server-10"]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"scheduling_strategy": Strategy("id1", soft=True)}),
        ({"role": None, "node_address": "10.0.0.9"}, {"resources": {"node:10.0.0.9": 0.001}}),
    ],
)
def test_actor_is_detached_named_and_started_again_for_ever(
    fields: dict[str, Any], options: dict[str, Any], rays: Rays, fake_ray: FakeRay
) -> None:
    made = spec("server-1", **fields)
    rays.create(made, "id1")
    settings = {
        "name": "server-1", "namespace": "forebay", "lifetime": "detached", "max_restarts": -1, "max_concurrency": 4,
        "num_cpus": 3.0, "memory": 5 << 30, "num_gpus": 1.0, **options,
    }  # fmt: skip
    assert fake_ray.events == [("create", Replica, settings, (made.encode(), place_of_actor))]


def test_actor_without_memory_asks_ray_for_none(rays: Rays, fake_ray: FakeRay) -> None:
    rays.create(spec("router-1", needs=Needs(num_cpus=0)), "id1")
    assert fake_ray.events[0][2]["memory"] is None


def test_pair_has_its_room_on_one_node_each_in_its_own_bundle(rays: Rays, fake_ray: FakeRay) -> None:
    pair = [spec("prefill-1", Role.PREFILL, group="prefill-1"), spec("decode-1", Role.DECODE, group="prefill-1")]
    pair[1] = msgspec.structs.replace(pair[1], needs=Needs(num_cpus=2.0, memory_bytes=7))
    rays.reserve_pair(pair)
    group = fake_ray.groups["prefill-1"]
    assert group.bundles == [{"CPU": 3.0, "memory": float(5 << 30), "GPU": 1.0}, {"CPU": 2.0, "memory": 7.0}]
    assert (group.strategy, group.lifetime, group.waited_s) == ("STRICT_PACK", "detached", [60.0])
    for each in pair:
        rays.create(each, "id1")
    strategies = [event[2]["scheduling_strategy"] for event in fake_ray.events]
    assert strategies == [Strategy(group, placement_group_bundle_index=index) for index in (0, 1)]
    rays.release("prefill-1")
    rays.release("prefill-1")  # of which nothing is left
    assert fake_ray.groups == {}


def test_pair_without_room_leaves_no_group(rays: Rays, fake_ray: FakeRay) -> None:
    fake_ray.groups_fit = False
    with pytest.raises(Unavailable, match="room for prefill-1 within 60 s"):
        rays.reserve_pair([spec("prefill-1", Role.PREFILL, group="prefill-1")])
    assert fake_ray.groups == {}


def test_calls_are_made_at_once_and_each_has_its_own_outcome(rays: Rays, fake_ray: FakeRay) -> None:
    answers = {"a": b"yes", "b": GetTimeoutError(), "c": ActorDiedError("it died\nfor good"), "d": RayError(" \n")}
    fake_ray.actors = {name: Actor(name, {"status": answer}) for name, answer in answers.items()}
    found = rays.call_all([*"abcde"], "status", b"argument", timeout_s=2.5)
    assert found == {
        "a": Outcome("a", value=b"yes"),
        "b": Outcome("b", error="no answer within 2.5 s: it waits for a node, or starts"),
        "c": Outcome("c", error="it died", is_dead=True),
        "d": Outcome("d", error="RayError"),
        "e": Outcome("e", error="there is no such server"),
    }
    assert [actor.calls for actor in fake_ray.actors.values()] == [[("status", b"argument")]] * 4
    assert fake_ray.events == [("wait", 4, 4, 2.5), *[("get", 0.1)] * 4]


def test_call_of_nobody_waits_for_nothing(rays: Rays, fake_ray: FakeRay) -> None:
    assert rays.call_all([], "status") == {}
    assert fake_ray.events == []


def test_call_of_one_returns_its_answer_or_raises_with_its_name(rays: Rays, fake_ray: FakeRay) -> None:
    fake_ray.actors = {"server-1": Actor("server-1", {"log": b"text"})}
    assert rays.call("server-1", "log", b"from") == b"text"
    assert fake_ray.actors["server-1"].calls == [("log", b"from")]
    assert fake_ray.events[0] == ("wait", 1, 1, 15.0)
    rays.call_all(["server-1"], "log")
    assert fake_ray.events[2] == ("wait", 1, 1, 15.0)
    with pytest.raises(Unavailable, match="server-1: no answer within 3 s"):
        rays.call("server-1", "spec", timeout_s=3)


def test_actor_that_is_ended_stays_so_and_its_weights_are_forgotten(rays: Rays, fake_ray: FakeRay) -> None:
    fake_ray.actors = {name: Actor(name) for name in ("server-1", "server-2")}
    updates = {name: Update(path=f"/{name}", num_updates=2) for name in (*fake_ray.actors, "server-3")}
    for name, update in updates.items():
        remember_update(name, update)
    assert [recall_update(name) for name in updates] == [*updates.values()]
    assert {namespace for namespace, _ in fake_ray.kept} == {"forebay"}
    rays.end(spec("server-1"))
    rays.end(spec("server-4"))
    assert fake_ray.events == [("kill", "server-1", True)]
    assert [*fake_ray.actors] == ["server-2"]
    assert [recall_update(name) is None for name in updates] == [True, False, False]


def test_place_of_actor_is_its_node_s_address_and_the_weights_that_were_kept(fake_ray: FakeRay) -> None:
    assert place_of_actor("server-1") == ("10.0.0.7", None)
    update = Update(path="/new", num_updates=1)
    remember_update("server-1", update)
    assert place_of_actor("server-1") == ("10.0.0.7", update)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nb", "a"), ("", "RayError"), ("x" * 400, "x" * 300), ("Traceback\n  a\nKeyError: 'b'\n", "KeyError: 'b'")],
)
def test_error_of_ray_is_one_line(text: str, line: str, rays: Rays, fake_ray: FakeRay) -> None:
    fake_ray.actors = {"a": Actor("a", {"status": RayError(text)})}
    assert rays.call_all(["a"], "status")["a"].error == line

"""What a group of actors waits for and says, with a Ray that only writes down and a clock that only sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError, EngineError, Unavailable
from forebay.cluster import group as group_module
from forebay.cluster.group import Group, answered
from forebay.cluster.messages import Needs, Phase, Spec, Status, Update, Updated
from forebay.cluster.rays import Outcome
from forebay.route.announcement import Role
from tests.cluster.test_group import Written
from tests.cluster.test_placement import GIB, node, spec


class Clock:
    """A clock that goes on while its users sleep."""

    def __init__(self) -> None:
        self.now, self.slept_s = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now += seconds


class Scripted(Written):
    """Actors that answer one after another what a test has for them; `asked` has the calls."""

    def __init__(self, *specs: Spec, **answers: Any) -> None:
        super().__init__(*specs)
        self.answers = {name.replace("_", "-"): list(found) for name, found in answers.items()}
        self.asked: list[tuple[Any, ...]] = []

    def call_all(self, names: Sequence[str], method: str, *sent: bytes, timeout_s: float = 15.0) -> dict[str, Outcome]:
        self.asked.append((sorted(names), method, timeout_s))
        return {name: self._next(name, method) for name in names}

    def call(self, name: str, method: str, *sent: bytes, timeout_s: float = 15.0) -> bytes:
        self.asked.append((name, method, *sent, timeout_s))
        return self._next(name, method).answer()

    def _next(self, name: str, method: str) -> Outcome:
        found = self.answers.get(name, [])
        answer = found.pop(0) if len(found) > 1 else found[0] if found else self._answer(self.specs[name], method)
        return answer if isinstance(answer, Outcome) else Outcome(name, value=answer)

    def reserve_pair(self, pair: Sequence[Spec]) -> None:
        self.events.append(f"reserve {' '.join(each.name for each in pair)}")

    def release(self, group: str) -> None:
        self.events.append(f"release {group}")


def state(name: str, phase: Phase, why: str = "") -> bytes:
    return Status(
        name=name, role=Role.BOTH, phase=phase, url=f"http://{name}:1", pid=7, instance="i", weight_version="5",
        num_starts=1, why=why, node_address="10.0.0.1", hostname="host1", cpus=(), notes=(),
    ).encode()  # fmt: skip


def silent(name: str, error: str = "no answer", **fields: Any) -> Outcome:
    return Outcome(name, error=error, **fields)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(group_module, "time", found)
    return found


def test_waiting_ends_when_all_are_ready_and_asks_only_those_that_are_not(clock: Clock) -> None:
    rays, lines = Scripted(), list[str]()
    rays.answers = {
        "a": [state("a", Phase.STARTING), state("a", Phase.READY)],
        "b": [state("b", Phase.READY)],
        "c": [silent("c"), silent("c"), state("c", Phase.READY)],
    }
    found = Group(rays, lines.append).wait_ready(["a", "b", "c"], 9.0)
    assert {name: status.url for name, status in found.items()} == {name: f"http://{name}:1" for name in "abc"}
    assert rays.asked == [(["a", "b", "c"], "status", 5.0), (["a", "c"], "status", 5.0), (["c"], "status", 5.0)]
    assert clock.slept_s == [0.3, 0.3]
    assert lines == [f"{name} is ready at http://{name}:1" for name in "bac"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (state("a", Phase.STARTING, "it ended with code 1"), "it ended with code 1"),
        (state("a", Phase.STARTING), "still starting"),
        (silent("a", "no answer within 5 s"), "no answer within 5 s"),
    ],
)
def test_waiting_ends_with_the_time_and_says_what_was_last_wrong(answer: Any, why: str, clock: Clock) -> None:
    rays = Scripted()
    rays.answers = {"a": [answer], "b": [state("b", Phase.READY)]}
    with pytest.raises(EngineError) as late:
        Group(rays, lambda _: None).wait_ready(["a", "b"], 0.6)
    assert late.value.message == (f"a not ready after 0.6 s ({why}): see forebay cluster logs, or give --ready-timeout")
    assert len(clock.slept_s) == 3  # 0.6 s themselves are allowed


def test_dead_actor_ends_the_waiting_at_once(clock: Clock) -> None:
    rays = Scripted(a=[silent("a", "its node has died", is_dead=True)])
    with pytest.raises(EngineError, match="a cannot be started: its node has died"):
        Group(rays, lambda _: None).wait_ready(["a"], 9.0)
    assert clock.slept_s == []


def test_states_are_those_of_all_actors_or_of_the_named(clock: Clock) -> None:
    rays = Scripted(spec("server-1"), spec("server-2"), server_2=[silent("server-2", "gone")])
    group = Group(rays, lambda _: None)
    found = group.statuses()
    assert [*found] == ["server-1", "server-2"]
    assert answered(found, "server-1").name == "server-1"
    with pytest.raises(Unavailable, match="server-2: gone"):
        answered(found, "server-2")
    assert [*group.statuses(["server-2"])] == ["server-2"]
    assert group.statuses([]) == {}
    assert {(method, timeout_s) for _, method, timeout_s in rays.asked} == {("status", 5.0)}


def test_specs_are_those_of_all_actors_or_none() -> None:
    specs = [spec("server-1"), spec("server-2")]
    assert Group(Scripted(*specs), lambda _: None).specs() == specs
    with pytest.raises(ConfigError, match="start some with forebay cluster up"):
        Group(Scripted(), lambda _: None).specs()
    with pytest.raises(Unavailable, match="server-2: no answer"):
        Group(Scripted(*specs, server_2=[silent("server-2")]), lambda _: None).specs()


def test_servers_are_created_on_their_nodes_and_a_pair_has_its_room_first() -> None:
    rays, lines, nodes = Scripted(), list[str](), [node(1, 8)]
    pair = [spec("prefill-1", Role.PREFILL), spec("decode-1", Role.DECODE, gpus=1), spec("prefill-2", Role.PREFILL)]
    nodes[0].num_gpus = 2
    created: list[tuple[str, str]] = []
    rays.create = lambda made, node_id: created.append((made.name, node_id))
    started = Group(rays, lines.append).start_servers(pair, in_pairs=True, nodes=nodes)
    assert [(each.name, each.group) for each in started] == [
        ("prefill-1", "prefill-1"), ("decode-1", "prefill-1"), ("prefill-2", "")
    ]  # fmt: skip
    assert rays.events == ["reserve prefill-1 decode-1"]
    assert created == [(each.name, "n1") for each in pair]
    assert lines == [
        "prefill-1 on n1 (10.0.0.1): 2 CPU, 2.00 GiB",
        "decode-1 on n1 (10.0.0.1): 2 CPU, 2.00 GiB, 1 GPU",
        "prefill-2 on n1 (10.0.0.1): 2 CPU, 2.00 GiB",
    ]
    with pytest.raises(Unavailable):
        Group(rays, lines.append).start_servers([spec("x", cpus=9)], in_pairs=False, nodes=nodes)
    assert len(created) == 3


def test_drain_has_the_longest_time_of_its_servers_and_says_who_did_not_answer() -> None:
    specs = [msgspec.structs.replace(spec(f"server-{i}"), drain_timeout_s=30.0 * i) for i in (1, 2)]
    rays, lines = Scripted(*specs, server_1=[silent("server-1", "its node is gone")]), list[str]()
    group = Group(rays, lines.append)
    group.drain([])
    assert rays.asked == []
    group.drain(specs)
    assert rays.asked == [(["server-1", "server-2"], "drain", 90.0)]
    assert lines == ["server-1 was ended without a drain: its node is gone", "server-2 has drained"]
    assert rays.events == ["end server-1", "end server-2"]


def test_room_of_a_pair_is_free_once_both_have_ended() -> None:
    pair = [msgspec.structs.replace(spec(f"{role}-1", role), group="prefill-1") for role in (Role.PREFILL, Role.DECODE)]
    lost = msgspec.structs.replace(spec("server-1"), group="prefill-1")  # it does not answer: nobody knows its group
    rays = Scripted(*pair, lost, spec("server-2"), server_1=[silent("server-1")])
    group = Group(rays, lambda _: None)
    group.end(pair[:1])
    assert rays.events == ["end prefill-1"]
    group.end(pair[1:])
    assert rays.events == ["end prefill-1", "end decode-1", "release prefill-1"]
    rays.asked.clear()
    group.end([rays.specs["server-2"]])
    assert rays.asked == []  # no group, no question


def test_updated_weights_are_counted_and_kept_only_if_they_were_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[str, Update]] = []
    monkeypatch.setattr(group_module, "remember_update", lambda *update: kept.append(update))
    status = msgspec.msgpack.decode(state("server-1", Phase.READY), type=Status)
    rays, lines = Scripted(spec("server-1")), list[str]()
    group = Group(rays, lines.append)
    rays.answers["server-1"] = [Updated(problem="it is another model", status=status).encode()]
    with pytest.raises(EngineError, match="server-1 has not updated its weights: it is another model"):
        group.update_weights(spec("server-1"), "/new", None)
    assert (kept, lines) == ([], [])
    rays.answers["server-1"] = [Updated(problem="", status=status).encode()]
    group.update_weights(spec("server-1"), "/new", None)
    group.update_weights(spec("server-1"), "/newer", Update(path="/new", num_updates=4))
    assert kept == [("server-1", Update(path=path, num_updates=count)) for path, count in (("/new", 1), ("/newer", 5))]
    assert lines == [f"server-1 has the weights of {path}, version 5" for path in ("/new", "/newer")]
    assert rays.asked[-1] == ("server-1", "update_weights", kept[-1][1].encode(), 3700.0)


def test_needs_of_a_server_without_a_gpu_name_none() -> None:
    assert group_module._needs_text(Needs(num_cpus=1.5, memory_bytes=GIB // 2)) == "1.5 CPU, 0.50 GiB"

"""What `forebay cluster status` and `logs` print, and the names of actions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.cluster import commands
from forebay.cluster.commands import _node_lines, _status_lines
from forebay.cluster.group import Group
from forebay.cluster.messages import Facts, Listener, LogPart, LogRequest, Phase, Spec, Status, Survey
from forebay.cluster.placement import Node
from forebay.cluster.process import Log
from forebay.cluster.rays import Outcome
from forebay.route.announcement import Role
from tests.cluster.test_group import Written
from tests.cluster.test_placement import node, spec
from tests.cluster.test_states import Clock

STATUS = Status(
    name="server-1", role=Role.BOTH, phase=Phase.READY, url="http://h:1", pid=7, instance="i", num_starts=1,
    weight_version="", why="", node_address="a", hostname="host1", cpus=(), notes=(),
)  # fmt: skip
SHORT_TIMEOUT = "  then all servers end, mid-stream: set RAY_gcs_rpc_server_reconnect_timeout_s=600 for Ray"
FACTS = Facts(hostname="n1", forebay="1", python="3", auth_mode="", niceness=0, gcs_timeout_s=600)


class Logged(Written):
    """Actors with logs; one without a file does not answer when its status is asked."""

    def __init__(self, logs: dict[str, Log]) -> None:
        super().__init__(*map(spec, logs))
        self.logs, self.surveys = logs, dict[str, Survey]()

    def survey(self, nodes: Sequence[Node], request: Callable[[Node], Survey]) -> dict[str, Facts]:
        self.surveys = {each.id: request(each) for each in nodes}
        return {each.id: FACTS for each in nodes}

    def call(self, name: str, method: str, request: bytes) -> bytes:
        assert method == "log"
        return self.logs[name].read(msgspec.msgpack.decode(request, type=LogRequest)).encode()

    def call_all(self, names: Sequence[str], method: str, *_: bytes, timeout_s: float = 0) -> dict[str, Outcome]:
        found = super().call_all(names, method)
        return {name: Outcome(name, error="gone") if name == "server-2" else found[name] for name in names}


@pytest.fixture
def rays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Logged:
    found: Any = Logged({f"server-{i}": Log(tmp_path / f"server-{i}.log") for i in (1, 2)})

    @contextlib.contextmanager
    def connected(address: str) -> Iterator[Group]:
        assert address == "h:1"
        yield Group(found, lambda _: None)

    monkeypatch.setattr(commands, "connected", connected)
    return found


def run(*words: str) -> None:
    assert commands.run([*words, "--address=h:1"]) == 0


def test_actions_are_listed_and_unknown_ones_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            commands.run([word])
        assert ended.value.code == 0
        first, empty, *lines = capsys.readouterr().out.splitlines()
        assert (first, empty) == ("usage: forebay cluster ACTION [options]", "")
        assert lines[0] == "  up       start servers and their router"
        assert [line.split()[0] for line in lines] == ["up", "status", "scale", "update", "logs", "down"]
    for words, name in (([], ""), (["ups"], "ups")):
        with pytest.raises(ConfigError, match=f"there is no `forebay cluster {name}`: use up, status, scale"):
            commands.run(words)
    called: list[list[str]] = []
    monkeypatch.setattr(commands, "ACTIONS", {"up": ("", called.append)})
    assert commands.run(["up", "--a", "b"]) == 0
    assert called == [["--a", "b"]]


def test_each_action_is_what_it_is_called() -> None:
    names = {name: action.__name__ for name, (_, action) in commands.ACTIONS.items()}
    assert names == {name: name for name in names}


def test_status_is_a_line_for_each_actor_and_node(rays: Logged, capsys: pytest.CaptureFixture[str]) -> None:
    run("status")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "no router runs: end the servers with forebay cluster down, then start again with forebay cluster up",
        "server-1     ready     http://n1:1  n1, pid 7, all cores, 1 start, weights 0",
        "  a bad word",
        "server-2     lost      gone",
        "node n1 (10.0.0.1): 8 of 8 CPU free, without the GCS for at most 600 s",
        "  open ports of n1: none",
    ]
    assert rays.surveys == {"n1": Survey(words=(), share=0, num_cpus=0, memory_bytes=0)}


def test_status_for_programs_has_all_that_is_known(rays: Logged, capsys: pytest.CaptureFixture[str]) -> None:
    run("status", "--json")
    text = capsys.readouterr().out
    assert text.startswith('{\n  "actors": [')
    found = json.loads(text)
    where = {"url": "http://n1:1", "hostname": "n1", "node_address": "10.0.0.1"}
    state = msgspec.structs.replace(STATUS, weight_version="0", why="a bad word", **where)
    assert found["actors"][0] == msgspec.to_builtins(state) | {"cpus": [], "notes": []}
    assert found["actors"][1] == {"name": "server-2", "phase": "lost", "why": "gone"}
    assert found["nodes"] == [{"address": "10.0.0.1", **msgspec.to_builtins(FACTS), "listeners": []}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "all cores, 1 start"),
        ({"num_starts": 0}, "all cores, 0 starts"),
        ({"cpus": (2, 5), "num_starts": 3, "weight_version": "4"}, "cores 2, 5, 3 starts, weights 4"),
    ],
)
def test_status_line_has_cores_starts_and_weights(fields: dict[str, Any], words: str) -> None:
    [line] = _status_lines("server-1", msgspec.structs.replace(STATUS, **fields))
    assert line == f"server-1     ready     http://h:1  host1, pid 7, {words}"


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"gcs_timeout_s": 300}, []),
        ({"gcs_timeout_s": 299}, [SHORT_TIMEOUT]),
        ({"gcs_timeout_s": 0, "problem": "it is broken"}, ["  it is broken"]),
        ({"niceness": 3}, ["  Ray gives its workers niceness 3: start it with RAY_worker_niceness=0"]),
    ],
)  # fmt: skip
def test_node_lines_say_what_to_change(fields: dict[str, Any], lines: list[str]) -> None:
    facts = msgspec.structs.replace(FACTS, listeners=(Listener(port=7, address="*", process="raylet"),), **fields)
    taken = node(1, -1)  # more is reserved than there is: Ray lets actors of no CPU in
    first, *between, last = _node_lines(taken, facts)
    assert first == f"node n1 (10.0.0.1): 0 of 8 CPU free, without the GCS for at most {facts.gcs_timeout_s} s"
    assert (between, last) == (lines, "  open ports of n1: raylet 7")


def test_logs_are_the_last_lines_of_one_or_of_all(rays: Logged, capsys: pytest.CaptureFixture[str]) -> None:
    for name, log in rays.logs.items():
        log.path.write_text("".join(f"{name} {i}\n" for i in range(30)))
    run("logs", "server-2", "--lines=2")
    assert capsys.readouterr().out == "server-2 28\nserver-2 29\n"
    run("logs", "--lines=1")
    assert capsys.readouterr().out == "server-1: server-1 29\nserver-2: server-2 29\n"
    run("logs", "server-1")
    assert len(capsys.readouterr().out.splitlines()) == 20
    with pytest.raises(ConfigError, match="there is no server 'server-9': there are server-1, server-2"):
        run("logs", "server-9")
    rays.specs.clear()
    with pytest.raises(ConfigError, match="there are none"):
        run("logs", "server-1")
    for count in ("0", "100001"):
        with pytest.raises(ConfigError):
            run("logs", f"--lines={count}")
    for count in ("1", "100000"):
        run("logs", f"--lines={count}")


def test_logs_ask_for_200_bytes_of_each_line(rays: Logged, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    call = rays.call

    def noted(name: str, method: str, request: bytes) -> bytes:
        asked.append(msgspec.msgpack.decode(request, type=LogRequest).offset)
        return call(name, method, request)

    rays.call = noted
    run("logs", "--lines=3")
    assert asked == [-600, -600]


class Interrupted(Clock):
    """A clock on which Ctrl-C follows some sleeps; before each one, something may be logged."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        super().__init__()
        self.steps = list(steps)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def test_followed_logs_print_whole_lines_once(
    rays: Logged, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rays.logs["server-1"].path

    def add(text: bytes) -> Callable[[], object]:
        def append() -> None:
            with path.open("ab") as file:
                file.write(text)

        return append

    path.write_bytes(b"old\n")
    clock = Interrupted(add(b"one\ntw"), add(b""), add(b"o\n\xff\n"))
    monkeypatch.setattr(commands, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        run("logs", "server-1", "--follow")
    assert capsys.readouterr().out == "old\none\ntwo\n\N{REPLACEMENT CHARACTER}\n"
    assert clock.slept_s == [0.5] * 4
    monkeypatch.setattr(commands, "time", Interrupted(add(b"new\n")))
    with pytest.raises(KeyboardInterrupt):
        run("logs", "--follow", "--lines=1")
    assert capsys.readouterr().out.splitlines()[-1] == "server-1: new"


def test_output_of_logs_is_written_at_once(rays: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []
    monkeypatch.setattr("sys.stdout.flush", lambda: flushed.append(True))
    run("logs", "server-1")
    assert flushed


def test_part_of_a_log_is_at_most_a_mebibyte(rays: Logged) -> None:
    rays.logs["server-1"].path.write_bytes(bytes((1 << 20) + 5))
    found = msgspec.msgpack.decode(rays.call("server-1", "log", LogRequest(offset=0).encode()), type=LogPart)
    assert (len(found.text), found.next_offset) == (1 << 20, 1 << 20)
    rest = rays.call("server-1", "log", LogRequest(offset=found.next_offset).encode())
    assert msgspec.msgpack.decode(rest, type=LogPart).text == bytes(5)


def test_spec_without_more_has_no_group_no_port_and_no_routers() -> None:
    bare = Spec(name="server-1", role=None, words=(), needs=spec("s").needs, host="")
    assert (bare.port, bare.routers, bare.node_address, bare.group, bare.drain_timeout_s) == (0, (), "", "", 30.0)
    assert (bare.cluster_key_file, bare.api_key_file, bare.admin_api_key_file) == ("", "", "")
    assert (FACTS.num_threads, FACTS.memory_bytes, FACTS.kv_cache_bytes) == (0, 0, 0)


@pytest.mark.parametrize("message", [STATUS, FACTS, spec("s"), LogRequest(offset=1)])
def test_message_with_an_unknown_field_is_refused(message: Any) -> None:
    """Commands and actors of two versions say so, rather than lose a field."""
    fields = msgspec.to_builtins(message) | {"added_later": 1}
    with pytest.raises(msgspec.ValidationError, match="added_later"):
        msgspec.convert(fields, type(message))
    with pytest.raises(AttributeError):
        message.words = ()

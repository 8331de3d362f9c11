"""The life of a replica: cores, surroundings, waits between starts, drain and announcement. Without Ray."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.cluster import replica
from forebay.cluster import surroundings as surroundings_module
from forebay.cluster.messages import Needs, Phase, Update
from forebay.cluster.process import Child, Log
from forebay.cluster.surroundings import Surroundings
from forebay.route import restarts
from forebay.route.announcement import Role, State
from tests.cluster.test_replica import Heard, fake, heard, is_running, make, status, wait_for
from tests.cluster.test_replica_questions import keys
from tests.deadlines import HANGS_S, wait_until

__all__ = ["fake"]  # a fixture


def test_actor_again_loads_weights_as_often_as_before_or_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = replica.Replica._load

    def noted(self: Any, path: str) -> str:
        loaded.append(path)
        return load(self, path)

    monkeypatch.setattr(replica.Replica, "_load", noted)
    found = make(update=Update(path="/new", num_updates=3))
    assert wait_for(found, Phase.READY).weight_version == "3"
    assert loaded == ["/new"] * 3
    found.drain()
    broken = make(update=Update(path="/nowhere", num_updates=1))
    wait_until(lambda: status(broken).num_starts >= 2)
    assert status(broken).phase is Phase.STARTING
    assert State.READY not in {state for _, state, _ in heard(broken).states}
    assert heard(broken).number >= 2
    broken.drain()


def test_server_without_cores_of_its_own_says_so_and_a_router_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(replica.Cores, "take", lambda _, count, topology: taken.append(count) or ())
    monkeypatch.setattr(replica, "note_of_niceness", lambda pid, wanted: "")  # the suite may run under `nice`
    found = make(needs=Needs(num_cpus=3.0))
    wait_for(found, Phase.READY)
    wait_until(lambda: status(found).notes != ())
    assert status(found).notes == ("its 3 threads have no cores of their own: other servers have those",)
    found.drain()
    assert taken == [3]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    router = make(role=None, port=port)
    wait_for(router, Phase.READY)
    assert (taken, status(router).notes, status(router).cpus) == ([3], (), ())
    router.drain()


def test_cores_are_kept_over_starts_and_free_after_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, ...]] = []
    start = Child.start

    def noted(self: Child, surroundings: Surroundings, environment: Any) -> None:
        started.append(surroundings.cpus)
        start(self, surroundings, environment)

    monkeypatch.setattr(Child, "start", noted)
    found = make(needs=Needs(num_cpus=1.0))
    first = wait_for(found, Phase.READY)
    assert len(first.cpus) == 1
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: status(found).num_starts == 2 and status(found).phase is Phase.READY)
    assert started == [first.cpus] * 2
    found.drain()
    assert status(found).cpus == ()


def test_process_has_the_surroundings_and_the_environment_of_the_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    started: list[Any] = []
    start = Child.start

    def environment(pid: int) -> dict[str, str]:
        asked.append(pid)
        return {"OMP_NUM_THREADS": "5"}

    def noted(self: Child, surroundings: Surroundings, environment: Any) -> None:
        started.append((surroundings, environment["OMP_NUM_THREADS"]))
        start(self, surroundings, environment)

    monkeypatch.setattr(replica, "environment_of_process", environment)
    monkeypatch.setattr(Child, "start", noted)
    monkeypatch.setattr(replica, "note_of_niceness", lambda pid, niceness: f"{pid} {niceness}")
    found = make()
    pid = wait_for(found, Phase.READY).pid
    niceness = os.getpriority(os.PRIO_PROCESS, os.getppid())
    wait_until(lambda: status(found).notes[:1] == (f"{pid} {niceness}",), lambda: str(status(found)))
    found.drain()
    assert asked == [os.getppid()]
    assert started == [(surroundings_module.wanted((), os.getppid()), "5")]


def test_drain_has_the_time_of_the_spec_and_of_a_signal_and_waits_for_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    announce, end, close = Heard.announce, Child.end, Heard.close

    def announced(self: Heard, state: State, **settings: Any) -> list[str]:
        if state is State.DRAINING:
            waits.append(("announce", settings))
        return [*announce(self, state, **settings), *(["http://r:1"] if state is State.DRAINING else [])]

    monkeypatch.setattr(Heard, "announce", announced)
    monkeypatch.setattr(Heard, "close", lambda self, wait_s: waits.append(("close", wait_s)) or close(self, wait_s))
    monkeypatch.setattr(Child, "end", lambda self, grace_s: waits.append(("end", grace_s)) or end(self, grace_s))
    found = make(drain_timeout_s=7.0)
    ready = wait_for(found, Phase.READY)
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(replica.log, "warning", lines.append)
        found.drain()
    assert waits == [("announce", {"wait_s": 5.0}), ("end", 12.0), ("close", 2.0)]
    assert lines == ["drain_unconfirmed server=server-1 routers=http://r:1"]
    assert not is_running(ready.pid)
    assert found._sock.fileno() == -1
    with pytest.raises(OSError):
        os.fstat(found._child._lease[1])
    assert not found._thread.is_alive()


def test_drain_of_a_server_that_has_not_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process starts behind the drain's back: it is ended at once."""
    entered, goes_on = threading.Event(), threading.Event()
    start = Child.start

    def late(self: Child, surroundings: Surroundings, environment: Any) -> None:
        entered.set()
        assert goes_on.wait(HANGS_S)
        start(self, surroundings, environment)

    monkeypatch.setattr(Child, "start", late)
    found = make()
    assert entered.wait(HANGS_S)
    thread = threading.Thread(target=found.drain)
    thread.start()
    wait_until(found._ending.is_set)
    assert status(found).phase is Phase.DRAINING
    goes_on.set()
    thread.join(HANGS_S)
    assert status(found).phase is Phase.ENDED
    assert not is_running(status(found).pid)
    assert State.READY not in {state for _, state, _ in heard(found).states}


def test_port_of_a_router_that_is_taken_is_said_until_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "BIND_RETRY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = make(role=None, port=port)
        wait_until(lambda: status(found).why != "")
        assert status(found).why.startswith(f"127.0.0.1:{port} cannot be used: Address already in use")
        hopeless = make(role=None, port=port)
        wait_until(lambda: status(hopeless).why != "")
        assert msgspec.msgpack.decode(hopeless.drain(), type=type(status(found))).phase is Phase.ENDED
    assert wait_for(found, Phase.READY).url == f"http://127.0.0.1:{port}"
    found.drain()


def test_server_listens_on_its_node_s_address_where_none_is_given() -> None:
    found = make(host="")
    wait_until(lambda: status(found).why.startswith("10.0.0.1 cannot be listened on"), lambda: str(status(found)))
    assert found._thread.is_alive()
    found.drain()
    listens = make(host="::1")
    wait_until(lambda: status(listens).url.startswith("http://[::1]:"))
    listens.drain()


def test_wait_before_a_start_doubles_until_a_process_has_lived_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, lived = [100.0], list[float](), list[bool]()
    monkeypatch.setattr(replica, "FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(replica, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = replica.Replica._run
    monkeypatch.setattr(replica.Replica, "_run", lambda self: None)
    monkeypatch.setattr(replica.Replica, "_listen", lambda self: object())

    def serve_once(self: Any, _: Any) -> int:
        assert self._phase is Phase.STARTING
        lives_long = len(waits) == 6 and not lived
        lived[:] = [*lived, lives_long] if lives_long else lived
        now[0] += 10.0 if lives_long else 9.9
        if len(waits) == 9:
            self._ending.set()
        return 1

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return self.is_set()

    monkeypatch.setattr(replica.Replica, "_serve_once", serve_once)
    monkeypatch.setattr(replica, "Child", lambda *_: type("Child", (), {"pid": 0})())
    found = make(role=None)
    found._ending = Ending()
    run(found)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 0.5, 1.0, 2.0]


def test_numbers_of_an_actor_s_waits_fit_each_other() -> None:
    """A command waits for longer than what it has asked for may take."""
    from forebay.cluster import group, rays

    assert group.DRAIN_MARGIN_S >= replica.CONFIRM_S + restarts.END_GRACE_S + replica.LOOK_S + 2 * replica.ASK_TIMEOUT_S
    assert group.UPDATE_TIMEOUT_S > replica.UPDATE_TIMEOUT_S
    assert replica.POLL_S <= 0.1  # a server that is ready is used at once
    assert replica.LOOK_S <= 3.0  # so old is the version of weights that routers know
    assert replica.BIND_RETRY_S <= 0.2
    assert rays._THREADS > 1  # its state is asked for while it drains


@pytest.mark.parametrize("has_key", [True, False])
def test_server_is_announced_with_its_role_and_the_cluster_s_key(
    has_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Noted(Heard):
        def __init__(self, *arguments: Any) -> None:
            super().__init__()
            made.append(arguments)

    monkeypatch.setattr(replica, "Announcer", Noted)
    files = keys(tmp_path, "cluster_key_file", "k" * 32) if has_key else {}
    found = make(role=Role.DECODE, routers=("http://r:1",), **files)
    ready = wait_for(found, Phase.READY)
    [(routers, url, role, key)] = made
    assert (routers, url, role) == (("http://r:1",), ready.url, Role.DECODE)
    assert (key == b"k" * 32) is has_key
    found.drain()
    with pytest.raises(ConfigError):
        make(api_key_file=str(tmp_path / "missing"))


def test_log_is_trimmed_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[Path] = []
    monkeypatch.setattr(Log, "trim", lambda self: trims.append(self.path))
    found = make()
    wait_for(found, Phase.READY)
    wait_until(lambda: len(trims) > 1)
    found.drain()

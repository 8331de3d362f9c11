"""An actor's process: started, watched, started again, announced, drained. Without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster import process, replica
from forebay.cluster.messages import LogPart, LogRequest, Needs, Phase, Spec, Status, Update, Updated
from forebay.cluster.process import Log
from forebay.cluster.replica import Replica
from forebay.route.announcement import Role, State
from tests.deadlines import wait_until

FAKE = Path(__file__).with_name("fake_server.py")


class Heard:
    """An `Announcer` that writes down what it is told."""

    def __init__(self, *_: Any) -> None:
        self.states: list[tuple[str, State, str]] = []
        self.number = 1
        self.closed = False

    @property
    def instance(self) -> str:
        return f"instance-{self.number}"

    def start(self) -> None:
        self.states.append((self.instance, State.STARTING, ""))

    def begin_instance(self) -> str:
        self.number += 1
        self.start()
        return self.instance

    def announce(self, state: State, *, weight_version: str = "", wait_s: float = 0.0) -> list[str]:
        self.states.append((self.instance, state, weight_version))
        return []

    def close(self, wait_s: float) -> list[str]:
        self.closed = True
        return []


@pytest.fixture(autouse=True)
def fake(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENTRY", [str(FAKE)])
    monkeypatch.setattr(replica, "Announcer", Heard)
    monkeypatch.setattr(replica, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(replica, "LOOK_S", 0.02)


def make(*words: str, role: Role | None = Role.BOTH, update: Update | None = None, **fields: Any) -> Replica:
    fields = {"host": "127.0.0.1", "drain_timeout_s": 9, "needs": Needs(num_cpus=0), **fields}
    spec = Spec(name="server-1", role=role, words=words, **fields)
    return Replica(spec.encode(), lambda name: ("10.0.0.1", update))


def status(found: Replica) -> Status:
    return msgspec.msgpack.decode(found.status(), type=Status)


def wait_for(found: Replica, phase: Phase) -> Status:
    wait_until(lambda: status(found).phase is phase, lambda: str(status(found)))
    return status(found)


def heard(found: Replica) -> Heard:
    announcer: Any = found._announcer
    assert isinstance(announcer, Heard)
    return announcer


def test_replica_announces_ready_with_the_weights_and_drains_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make()
    ready = wait_for(found, Phase.READY)
    assert (ready.node_address, ready.num_starts, ready.weight_version) == ("10.0.0.1", 1, "0")
    order: list[str] = []
    announce, end = Heard.announce, process.Child.end

    def told(self: Heard, state: State, **settings: Any) -> list[str]:
        order.append(state)
        return announce(self, state, **settings)

    def ended(self: process.Child, grace_s: float) -> None:
        order.append("SIGTERM")
        end(self, grace_s)

    monkeypatch.setattr(Heard, "announce", told)
    monkeypatch.setattr(process.Child, "end", ended)
    assert msgspec.msgpack.decode(found.drain(), type=Status).phase is Phase.ENDED
    assert order == [State.DRAINING, "SIGTERM"]
    assert heard(found).closed
    assert not Path(f"/proc/{ready.pid}").exists()


def test_server_that_drains_is_never_announced_as_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    found = make()
    wait_for(found, Phase.READY)
    end = process.Child.end

    def news_then_end(self: process.Child, grace_s: float) -> None:
        assert found._load("/new") == ""
        found._look()
        end(self, grace_s)

    monkeypatch.setattr(process.Child, "end", news_then_end)
    found.drain()
    assert heard(found).states[-1][1] is State.DRAINING


def test_process_that_dies_is_another_instance_at_the_same_url() -> None:
    found = make()
    first = wait_for(found, Phase.READY)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: status(found).num_starts == 2 and status(found).phase is Phase.READY)
    second = status(found)
    assert (second.url, second.instance) == (first.url, "instance-2")
    states = heard(found).states
    assert states.index(("instance-2", State.STARTING, "")) < states.index(("instance-2", State.READY, "0"))
    found.drain()


def test_process_that_ends_early_is_started_again_and_its_log_is_told(tmp_path: Path) -> None:
    found = make(f"--ends-at-first={tmp_path / 'mark'}")
    wait_until(lambda: status(found).num_starts == 2)
    assert wait_for(found, Phase.READY).why == ""
    part = msgspec.msgpack.decode(found.log(LogRequest(offset=0).encode()), type=LogPart)
    assert part.text.count(b"started with") == 2
    found.drain()


def test_server_that_refuses_its_configuration_is_not_started_again() -> None:
    found = make("--exit=2")
    refused = wait_for(found, Phase.REFUSED)
    assert refused.num_starts == 1
    assert refused.why.startswith("the last process ended with code 2: started with")
    assert heard(found).states[-1][1] is State.GONE
    found.drain()


def test_weights_are_updated_and_loaded_again_after_a_death() -> None:
    """Peers compare how often weights were updated, so a new process is brought to the same count."""
    found = make()
    wait_for(found, Phase.READY)

    def update(path: str, count: int) -> str:
        answer = found.update_weights(Update(path=path, num_updates=count).encode())
        return msgspec.msgpack.decode(answer, type=Updated).problem

    assert update("/nowhere", 1) == "there is nothing"
    assert update("/new", 1) == update("/newer", 2) == ""
    assert ("instance-1", State.READY, "2") in heard(found).states
    os.kill(status(found).pid, signal.SIGKILL)
    wait_until(lambda: ("instance-2", State.READY, "2") in heard(found).states)
    assert ("instance-2", State.READY, "0") not in heard(found).states
    found.drain()


def test_actor_started_again_by_ray_has_the_weights_of_before() -> None:
    found = make(update=Update(path="/new", num_updates=1))
    assert wait_for(found, Phase.READY).weight_version == "1"
    found.drain()


def test_router_has_its_port_and_is_not_announced(free_port: int) -> None:
    found = make(role=None, port=free_port)
    assert wait_for(found, Phase.READY).url == f"http://127.0.0.1:{free_port}"
    assert found._announcer is None
    found.drain()


def test_router_on_all_interfaces_is_known_by_its_node_s_address(free_port: int) -> None:
    found = make(role=None, port=free_port, host="0" + ".0" * 3)
    assert wait_for(found, Phase.READY).url == f"http://10.0.0.1:{free_port}"
    found.drain()


def test_prefill_server_has_a_bootstrap_port_outside_ray_s_ranges() -> None:
    found = make(role=Role.PREFILL)
    wait_for(found, Phase.READY)
    text = found._log.last_lines(1)
    assert "--host=127.0.0.1" in text
    assert 20000 <= int(text.rpartition("--disaggregation-bootstrap-port=")[2]) < 30000
    found.drain()


def test_process_ends_with_the_actor_that_is_killed(home: Path) -> None:
    code = (
        "import msgspec, time, sys; from forebay.cluster import process, replica\n"
        f"process.ENTRY = [{str(FAKE)!r}]\n"
        "from forebay.cluster.messages import *\n"
        "spec = Spec(name='server-1', role='both', words=(), needs=Needs(num_cpus=0), host='127.0.0.1')\n"
        "found = replica.Replica(spec.encode(), lambda name: ('127.0.0.1', None))\n"
        "while (status := msgspec.msgpack.decode(found.status(), type=Status)).phase != 'ready': time.sleep(0.01)\n"
        "print(status.pid, flush=True); time.sleep(3600)\n"
    )
    actor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    pid = int(actor.stdout.readline())
    actor.kill()
    actor.wait()
    actor.stdout.close()
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("num_bytes", "is_moved"), [(9, False), (10, False), (11, True)])
def test_log_is_moved_above_its_limit_alone_and_is_its_users(tmp_path: Path, num_bytes: int, is_moved: bool) -> None:
    log = Log(tmp_path / "logs" / "server-1.log", max_bytes=10)
    descriptor = log.open()
    os.write(descriptor, b"x" * num_bytes)
    os.close(descriptor)
    log.trim()
    assert log.path.stat().st_size == (0 if is_moved else num_bytes)
    assert (tmp_path / "logs" / "server-1.log.1").exists() is is_moved
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.path.parent.stat().st_mode & 0o777 == 0o700


def test_log_that_is_too_long_is_moved_and_read_on(tmp_path: Path) -> None:
    log = Log(tmp_path / "server-1.log", max_bytes=10)
    descriptor = log.open()
    os.write(descriptor, b"0123456789\nabc\n")
    part = log.read(LogRequest(offset=-4))
    assert (part.text, part.next_offset) == (b"abc\n", 15)
    log.trim()
    os.write(descriptor, b"new\n")
    os.close(descriptor)
    assert log.read(LogRequest(offset=part.next_offset)).text == b"new\n"
    assert (tmp_path / "server-1.log.1").read_bytes() == b"0123456789\nabc\n"
    assert log.last_lines(1) == "new"

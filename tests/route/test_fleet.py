"""When server processes that end are started again, and what the router is told (C27)."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from forebay.base import child
from forebay.base.exit_codes import EXIT_REFUSED
from forebay.config.engine_config import Chaos, DisaggregationMode
from forebay.route import fleet
from forebay.route.announcement import Role
from forebay.route.fleet import Fleet, Server


class Ends:
    """A fleet of one server, whose process ends at once, so many times with `code`, after a life of `life_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, code: int = 1, life_s: float = 0.0) -> None:
        self.times, self.code, self.life_s = times, code, life_s
        self.waits: list[float] = []
        self.lost: list[str] = []
        self.dead: list[object] = []
        self.ended = False
        self.server = Server(DisaggregationMode.DECODE, (), socket.create_server(("127.0.0.1", 0)))
        self.fleet = Fleet([self.server])
        self.member = SimpleNamespace(url=self.server.origin, info={})
        monkeypatch.setattr(Fleet, "_start", lambda _, server: self.start(server))
        monkeypatch.setattr(fleet.asyncio, "sleep", self.sleep)
        monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: 100.0))

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def start(self, server: Server) -> None:
        assert not self.ended, "a process that was ended is started again"
        server.num_starts += 1
        server.started_at = 100.0 - self.life_s
        server.process = self

    def wait(self, timeout: float = 0.0) -> int:
        self.times -= 1
        if self.times < 0:
            self.end()
        return self.code

    def end(self) -> None:
        """End the fleet, while it waits for its process."""
        if not self.ended:
            self.ended = True
            self.fleet.__exit__(None, None, None)

    def terminate(self) -> None: ...

    def run(self) -> None:
        members = SimpleNamespace(all=[self.member], lost=lambda member, why: self.lost.append(why))
        router = SimpleNamespace(members=members, die=self.dead.append)
        self.fleet.__enter__()
        asyncio.run(self.fleet._keep(self.server, router))  # type: ignore[arg-type]
        self.end()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("CRITICAL"):
        yield


def test_fleet_process_that_ends_young_again_and_again_waits_longer_each_time(monkeypatch, caplog):
    ends = Ends(monkeypatch, times=7)
    with caplog.at_level(logging.WARNING, "forebay"):
        ends.run()
    assert ends.waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert ends.lost == ["its process ended with code 1"] * 7
    assert messages(caplog) == [f"server_ended role=decode at={ends.member.url} code=1"] * 7
    assert (ends.server.num_starts, ends.dead) == (8, [])


def test_fleet_process_that_ends_old_is_started_at_once(monkeypatch):
    ends = Ends(monkeypatch, times=3, life_s=10.0)
    ends.run()
    assert (ends.waits, ends.server.num_starts) == ([], 4)


def test_fleet_process_that_ends_young_after_a_long_life_waits_no_longer_than_at_first(monkeypatch):
    lives = [9.9, 0.0, 10.0, 0.0, 9.9]
    ends = Ends(monkeypatch, times=5)
    start = ends.start

    def of_its_life(server: Server) -> None:
        ends.life_s = lives.pop(0) if lives else 0.0
        start(server)

    monkeypatch.setattr(ends, "start", of_its_life)
    ends.run()
    assert ends.waits == [0.5, 1.0, 0.5, 1.0]


@pytest.mark.parametrize("came_up", [False, True])
def test_fleet_configuration_that_is_refused_ends_the_router_unless_it_was_served(monkeypatch, came_up):
    ends = Ends(monkeypatch, times=1, code=EXIT_REFUSED)
    ends.member.info = {"model": "it"} if came_up else {}
    ends.run()
    assert (len(ends.dead), ends.server.num_starts) == ((0, 2) if came_up else (1, 1))


def test_fleet_process_that_ends_with_the_fleet_is_not_started_again(monkeypatch):
    ends = Ends(monkeypatch, times=0)
    ends.run()
    assert (ends.server.num_starts, ends.lost) == (1, [])


def test_fleet_process_that_does_not_end_in_time_is_killed(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: 100.0))

    class Stubborn:
        def terminate(self) -> None:
            seen.append("terminate")

        def kill(self) -> None:
            seen.append("kill")

        def wait(self, timeout: float | None = None) -> int:
            if "kill" not in seen:
                assert timeout == 5.0
                raise subprocess.TimeoutExpired("it", timeout or 0.0)
            seen.append("waited for")
            return -9

    server = Server(DisaggregationMode.DECODE, (), socket.create_server(("127.0.0.1", 0)))
    server.process = Stubborn()
    Fleet([server]).__exit__(None, None, None)
    assert seen == ["terminate", "kill", "waited for"]


def server_of(role: DisaggregationMode, *words: str) -> Server:
    return Server(role, words, socket.create_server(("127.0.0.1", 0)))


class Started:
    """The processes that a fleet starts, none of which runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[str], dict[str, object]]] = []
        monkeypatch.setattr(fleet.subprocess, "Popen", self.start)

    def start(self, words: list[str], **options: object) -> SimpleNamespace:
        self.calls.append((words, options))
        return SimpleNamespace(pid=40 + len(self.calls), terminate=lambda: None, wait=lambda _=0.0: 0)


def test_fleet_process_gets_its_socket_the_lease_the_keys_and_no_key_in_its_environment(monkeypatch, caplog):
    monkeypatch.setenv("FOREBAY_API_KEY", "canary")
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: 100.0))
    started, server = Started(monkeypatch), server_of(DisaggregationMode.DECODE, "--model", "it")
    keys = os.open(os.devnull, os.O_RDONLY)
    with caplog.at_level(logging.INFO, "forebay"), Fleet([server], files=[keys]) as made:
        listening, lease = server.sock.fileno(), made._lease[0]
        [(words, options)] = started.calls
        assert words == [sys.executable, *fleet.ENTRY, str(listening), str(lease), "--model", "it"]
        assert options["pass_fds"] == [listening, lease, keys]
        assert options["start_new_session"] is True
        assert options["stdin"] == options["stdout"] == subprocess.DEVNULL
        assert "canary" not in options["env"].values()
        assert (server.num_starts, server.started_at) == (1, 100.0)
        origin = server.origin
    assert messages(caplog) == [f"server_started role=decode at={origin} pid=41"]


def test_fleet_of_both_roles_watches_each_server_and_kills_those_that_chaos_names(monkeypatch):
    Started(monkeypatch)
    servers = [server_of(role) for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)]
    spawned = []

    def spawn(job):
        spawned.append(
            (job.__name__, *(v for v in inspect.getcoroutinelocals(job).values() if not isinstance(v, Fleet)))
        )
        job.close()

    router = SimpleNamespace(spawn=spawn)
    with Fleet(servers, chaos=Chaos(kill_decode_s=3.0)) as made:
        assert made.urls() == {Role.PREFILL: [servers[0].origin], Role.DECODE: [servers[1].origin]}
        made.watch(router)
    keeps = [("_keep", server, router) for server in servers]
    assert spawned == [*keeps, ("_kill_now_and_then", DisaggregationMode.DECODE, 3.0)]


def test_fleet_chaos_kills_a_server_of_its_role_after_half_to_one_and_a_half_periods(monkeypatch, caplog):
    waits: list[float] = []
    killed: list[DisaggregationMode] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 200:
            raise TimeoutError

    servers = [server_of(role) for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)]
    for server in servers:
        server.process = SimpleNamespace(kill=partial(killed.append, server.role))
    monkeypatch.setattr(fleet.asyncio, "sleep", sleep)
    with caplog.at_level(logging.WARNING, "forebay"), pytest.raises(TimeoutError):
        asyncio.run(Fleet(servers)._kill_now_and_then(DisaggregationMode.PREFILL, 4.0))
    assert killed == [DisaggregationMode.PREFILL] * 200
    assert 2.0 <= min(waits) < 2.5 < 5.5 < max(waits) <= 6.0
    assert set(messages(caplog)) == {f"server_killed_on_purpose role=prefill at={servers[0].origin}"}
    for server in servers:
        server.sock.close()

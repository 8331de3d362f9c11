"""When server processes that end are started again, and what the router is told (C27)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from forebay.config.engine_config import DisaggregationMode
from forebay.route import fleet
from forebay.route.fleet import Fleet, Server
from forebay.route.restarts import EXIT_REFUSED, LONGEST_WAIT_S


class Ends:
    """A fleet of one server, whose process ends at once, so many times with `code`, after a life of `life_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, code: int = 1, life_s: float = 0.0) -> None:
        self.times, self.code, self.life_s = times, code, life_s
        self.waits: list[float] = []
        self.lost: list[str] = []
        self.dead: list[object] = []
        self.server = Server(DisaggregationMode.DECODE, (), socket.create_server(("127.0.0.1", 0)))
        self.fleet = Fleet([self.server])
        self.member = SimpleNamespace(url=self.server.origin, info={})
        monkeypatch.setattr(Fleet, "_start", lambda _, server: self.start(server))
        monkeypatch.setattr(fleet.asyncio, "sleep", self.sleep)
        monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: 100.0))

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def start(self, server: Server) -> None:
        assert not self.fleet._ending, "who was ended is started again"
        server.num_starts += 1
        server.started_at = 100.0 - self.life_s
        server.process = self

    def wait(self, timeout: float = 0.0) -> int:
        self.times -= 1
        self.fleet._ending = self.times < 0
        return self.code

    def terminate(self) -> None: ...

    def run(self) -> None:
        members = SimpleNamespace(all=[self.member], lost=lambda member, why: self.lost.append(why))
        router = SimpleNamespace(members=members, die=self.dead.append)
        with self.fleet:
            asyncio.run(self.fleet._keep(self.server, router))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("CRITICAL"):
        yield


def test_fleet_process_that_ends_young_again_and_again_waits_longer_each_time(monkeypatch):
    ends = Ends(monkeypatch, times=7)
    ends.run()
    assert ends.waits == [0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert ends.lost == ["its process ended with code 1"] * 7
    assert (ends.server.num_starts, ends.dead) == (8, [])


def test_fleet_process_that_ends_old_is_started_at_once(monkeypatch):
    ends = Ends(monkeypatch, times=3, life_s=fleet.LONG_LIFE_S + 60.0)
    ends.run()
    assert (ends.waits, ends.server.num_starts) == ([], 4)


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


def test_fleet_process_that_does_not_end_in_time_is_killed():
    seen: list[str] = []

    class Stubborn:
        def terminate(self) -> None:
            seen.append("terminate")

        def kill(self) -> None:
            seen.append("kill")

        def wait(self, timeout: float | None = None) -> int:
            if "kill" not in seen:
                raise subprocess.TimeoutExpired("it", timeout or 0.0)
            seen.append("waited for")
            return -9

    server = Server(DisaggregationMode.DECODE, (), socket.create_server(("127.0.0.1", 0)))
    server.process = Stubborn()
    Fleet([server]).__exit__(None, None, None)
    assert seen == ["terminate", "kill", "waited for"]

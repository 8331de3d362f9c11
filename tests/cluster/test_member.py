"""The process of an actor: what it does with its arguments, and in which order."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from forebay.base.errors import ConfigError
from forebay.cluster import member
from forebay.cluster.surroundings import Surroundings

SURROUNDINGS = Surroundings(niceness=1, oom_score_adj=2, cpus=(3,))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process does before it serves or routes."""
    found: list[Any] = []
    monkeypatch.setattr(member, "restore", lambda target: found.append(("restore", target)))
    monkeypatch.setattr("forebay.cli.member.end_with", lambda lease: found.append(("end with", lease)))
    return found


def test_server_is_itself_again_before_it_serves(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def serve() -> None:
        events.append(("serve", sys.argv[1:]))
        raise SystemExit(7)

    monkeypatch.setattr("forebay.cli.member.main", serve)
    monkeypatch.setattr(sys, "argv", ["member", "serve", SURROUNDINGS.as_text(), "5", "6", "--a", "--b"])
    with pytest.raises(SystemExit) as ended:
        member.main()
    assert ended.value.code == 7
    assert events == [("restore", SURROUNDINGS), ("serve", ["5", "6", "--a", "--b"])]


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ConfigError("no"), 2)])
def test_router_routes_on_its_socket_until_the_actor_ends(
    error: Exception | None, code: int, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def route(words: list[str], sock: socket.socket) -> int:
        with sock:
            events.append(("route", words, sock.getsockname()))
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr("forebay.cli.route.run", route)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, descriptor = listening.getsockname(), str(listening.detach())
    monkeypatch.setattr(sys, "argv", ["member", "route", SURROUNDINGS.as_text(), descriptor, "6", "--a"])
    with pytest.raises(SystemExit) as ended:
        member.main()
    assert ended.value.code == code
    assert events == [("restore", SURROUNDINGS), ("end with", 6), ("route", ["--a"], address)]

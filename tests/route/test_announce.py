"""The announcements of a server to its routers."""

from __future__ import annotations

import http.client
import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from forebay.base.http_client import Origin
from forebay.base.proof import PROOF, Message, Proofs, digest_of
from forebay.route import announce
from forebay.route.announce import Announcer
from forebay.route.announcement import (
    ANNOUNCE_INTERVAL_S,
    LEASE_S,
    MEMBERS_PATH,
    Announcement,
    Role,
    State,
)
from tests.deadlines import HANGS_S, NEVER_S

KEY = b"cluster-canary-0123456789"
URL = "http://10.0.0.1:30001"


class FakeRouter:
    """Keeps all announcements, and answers each with `status`."""

    def __init__(self) -> None:
        self.heard: queue.Queue[Announcement] = queue.Queue()
        self.digests: list[tuple[str, str]] = []  # of each body: as it was proved, and as it came
        self.proofs = Proofs(KEY)
        self.status = 200
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if PROOF in self.headers:
                    message = Message(method="POST", target=self.path, host=self.headers["host"])
                    router.digests.append((router.proofs.check(self.headers[PROOF], message), digest_of(body)))
                self.send_response(router.status)
                self.send_header("content-length", "0")
                self.end_headers()
                router.heard.put(msgspec.json.decode(body, type=Announcement))

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=lambda: self.server.serve_forever(0.01))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def next(self) -> Announcement:
        return self.heard.get(timeout=HANGS_S)


Make = Callable[..., Announcer]


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    made = FakeRouter()
    yield made
    made.close()


@pytest.fixture
def announcer(router: FakeRouter) -> Iterator[Make]:
    """`announcer(*routers, interval_s=...)` announces to the fake router and the given ones."""
    made: list[Announcer] = []

    def make(*routers: str, interval_s: float = NEVER_S) -> Announcer:
        made.append(Announcer([router.url, *routers], URL, Role.BOTH, KEY, interval_s=interval_s))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close(0.0)


def test_announcer_changes_reach_the_router_at_once_in_order(announcer: Make, router: FakeRouter) -> None:
    """The interval is longer than the test."""
    one = announcer()
    heard = [router.next()]
    for state in (State.READY, State.DRAINING):
        assert one.announce(state, weight_version="v2", wait_s=HANGS_S) == []
        heard.append(router.next())
    assert one.close(HANGS_S) == []
    heard.append(router.next())
    assert [each.state for each in heard] == ["starting", "ready", "draining", "gone"]
    assert [each.weight_version for each in heard] == ["", "v2", "v2", "v2"]
    assert {(each.url, each.role, each.instance) for each in heard} == {(URL, Role.BOTH, one.instance)}
    assert sorted({each.sequence for each in heard}) == [each.sequence for each in heard]
    assert len(router.digests) == 4
    assert all(proved == came for proved, came in router.digests)


def test_announcer_repeats_itself_and_a_new_process_is_a_new_instance(announcer: Make, router: FakeRouter) -> None:
    one = announcer(interval_s=0.01)
    first = one.instance
    assert {router.next().instance for _ in range(3)} == {first}
    assert one.begin_instance("v3") == one.instance != first
    one.announce(State.READY, wait_s=HANGS_S)
    while (last := router.next()).state is not State.READY:
        pass
    assert (last.instance, last.weight_version) == (one.instance, "v3")


def test_announcer_router_that_refuses_or_is_away_delays_no_other_and_is_tried_again(
    announcer: Make, router: FakeRouter
) -> None:
    refusing = FakeRouter()
    refusing.status = 409
    try:
        away = "http://127.0.0.1:9"
        one = announcer(refusing.url, away, interval_s=0.02)
        assert one.announce(State.READY) == [router.url, refusing.url, away]
        assert one.announce(State.GONE, wait_s=0.05) == [refusing.url, away]
        while router.next().state is not State.GONE:
            pass
        refusing.status = 200
        while one._lines[1].num_confirmed < 2:
            refusing.next()
    finally:
        refusing.close()


def test_announcement_lease_outlives_two_lost_announcements_and_not_three() -> None:
    """Docs: every 3 s, for 10 s."""
    assert (ANNOUNCE_INTERVAL_S, LEASE_S) == (3.0, 10.0)
    assert 3 * ANNOUNCE_INTERVAL_S < LEASE_S < 4 * ANNOUNCE_INTERVAL_S


@pytest.mark.parametrize(("field", "most"), [("url", 512), ("weight_version", 128)])
def test_announcement_text_above_its_length_is_refused(field: str, most: int) -> None:
    said = {"url": URL, "role": "both", "instance": "0" * 32, "weight_version": "", "state": "ready", "sequence": 0}
    assert msgspec.convert(said | {field: "a" * most}, Announcement)
    for wrong in ({field: "a" * (most + 1)}, {"sequence": -1}, {"instance": "0" * 31}, {"unknown": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(said | wrong, Announcement)


class Connection:
    """A connection of a library: `fails` when it sends, or answers 503 with more text than is read."""

    made: list[Connection]

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.peer, self.timeout, self.is_closed = (host, port), timeout, False
        self.made.append(self)

    def request(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> None:
        assert (method, target, body) == ("POST", f"/below{MEMBERS_PATH}", b"{}")
        assert headers["Connection"] == "close"
        if len(self.made) == 2:
            raise ConnectionResetError

    def getresponse(self) -> Connection:
        self.status = 503
        return self

    def read(self, most: int) -> bytes:
        return b"x" * most

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(("scheme", "kind"), [("http", "HTTPConnection"), ("https", "HTTPSConnection")])
def test_announcer_closes_its_connection_to_a_router_that_refuses_or_fails(
    scheme: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "made", [], raising=False)
    monkeypatch.setattr(http.client, kind, Connection)
    line = announce._Line(Announcer([], URL, Role.BOTH), Origin(f"{scheme}://router:7/below"), b"", 1.0)
    assert line._post(b"{}") == "HTTP 503: " + "x" * 1000
    assert line._post(b"{}") == "ConnectionResetError"
    assert [(one.peer, one.timeout, one.is_closed) for one in Connection.made] == [(("router", 7), 2.0, True)] * 2


def test_announcer_of_a_router_that_stays_away_logs_one_line_and_one_when_it_is_back(
    announcer: Make, router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router.status = 503
    with caplog.at_level("WARNING", "forebay"):
        one = announcer(interval_s=0.01)
        for _ in range(4):
            router.next()
        router.status = 200
        assert one.announce(State.READY, wait_s=HANGS_S) == []
        one.close(HANGS_S)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f'not_announced to={router.url} why="HTTP 503: "', f"announced_again to={router.url} why="]

"""The questions of a replica to its server, and the answers that it announces. Without Ray."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster import replica
from forebay.cluster.messages import Phase, Update, Updated
from forebay.route.announcement import Role, State
from tests.cluster.test_replica import Heard, fake, make, status

__all__ = ["fake"]  # a fixture


class Asked(HTTPServer):
    """A server of HTTP that notes what it is asked, and answers what a test has for it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.requests: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.answer: tuple[int, bytes] = (200, b"{}")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append((self.command, self.path, body, dict(self.headers.items())))
                self.send_response(outer.answer[0])
                self.send_header("Content-Length", str(len(outer.answer[1])))
                self.end_headers()
                self.wfile.write(outer.answer[1])

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return

        super().__init__((host, 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def asked() -> Any:
    found = Asked()
    yield found
    found.shutdown()
    found.server_close()


def replica_of(asked: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """A replica whose process is `asked`, and which does nothing by itself."""
    monkeypatch.setattr(replica.Replica, "_run", lambda self: None)
    found = make(**fields)
    found._sock = asked.socket
    return found


def keys(folder: Path, name: str, text: str) -> dict[str, str]:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return {name: str(path)}


def test_question_has_the_key_of_users_and_a_change_that_of_administrators(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, admin = "sk-user-0123456789", "sk-admin-0123456789"
    files = keys(tmp_path, "api_key_file", user) | keys(tmp_path, "admin_api_key_file", admin)
    found = replica_of(asked, monkeypatch, **files)
    assert found._ask("GET", "/a") == (200, {})
    assert found._load("/new") == ""
    assert [(verb, path, body, headers["Authorization"]) for verb, path, body, headers in asked.requests] == [
        ("GET", "/a", b"", f"Bearer {user}"),
        ("POST", "/update_weights_from_disk", b'{"model_path":"/new"}', f"Bearer {admin}"),
    ]
    assert {headers["Content-Type"] for *_, headers in asked.requests} == {"application/json"}
    asked.requests.clear()
    plain = replica_of(asked, monkeypatch, api_key_file=files["api_key_file"])
    plain._load("/new")
    keyless = replica_of(asked, monkeypatch)
    keyless._load("/new")
    assert [headers.get("Authorization") for *_, headers in asked.requests] == [f"Bearer {user}", None]


@pytest.mark.parametrize(
    ("answer", "asked_status", "body", "problem"),
    [
        ((200, b""), 200, {}, ""),
        ((200, b"[1]"), 200, {}, ""),
        ((500, b"{"), 0, {}, "HTTP 0"),
        ((404, b"{}"), 404, {}, "HTTP 404"),
        ((400, b'{"error":{"message":"no"}}'), 400, {"error": {"message": "no"}}, "no"),
        ((400, b'{"error":"no"}'), 400, {"error": "no"}, "{'error': 'no'}"),
    ],
)
def test_answer_that_is_no_object_is_an_empty_one(
    answer: tuple[int, bytes],
    asked_status: int,
    body: dict[str, Any],
    problem: str,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = replica_of(asked, monkeypatch)
    asked.answer = answer
    assert found._ask("GET", "/a") == (asked_status, body)
    assert found._load("/new") == problem


def test_question_waits_two_seconds_and_a_change_an_hour(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    found, limits = replica_of(asked, monkeypatch), list[float]()
    connection = replica.http.client.HTTPConnection

    def connect(host: str, port: int, *, timeout: float) -> Any:
        limits.append(timeout)
        return connection(host, port, timeout=timeout)

    monkeypatch.setattr(replica.http.client, "HTTPConnection", connect)
    found._ask("GET", "/a")
    found._load("/new")
    assert limits == [2.0, 3600.0]


@pytest.mark.parametrize(("all_of", "loopback"), [("0" + ".0" * 3, "127.0.0.1"), ("::", "::1")])
def test_process_on_all_interfaces_is_asked_on_loopback(
    all_of: str, loopback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replica_of(type("Asked", (), {"socket": None}), monkeypatch)
    with socket.create_server((all_of, 0), family=socket.AF_INET6 if ":" in all_of else socket.AF_INET) as sock:
        found._sock, hosts = sock, list[str]()
        monkeypatch.setattr(
            replica.http.client, "HTTPConnection", lambda host, port, timeout: hosts.append(host) or refusing()
        )
        assert found._ask("GET", "/a") == (0, {})
    assert hosts == [loopback]


def refusing() -> Any:
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError

    return type("Connection", (), {"request": refuse, "close": lambda _: None})()


def test_state_has_each_field_of_its_own(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replica_of(asked, monkeypatch)
    bare = status(found)
    assert (bare.phase, bare.url, bare.pid, bare.instance, bare.weight_version) == (Phase.STARTING, "", 0, "", "")
    assert (bare.num_starts, bare.why, bare.cpus, bare.notes) == (0, "", (), ())
    assert (bare.name, bare.role, bare.node_address, bare.hostname) == (
        "server-1", Role.BOTH, "10.0.0.1", socket.gethostname()
    )  # fmt: skip
    found._child, found._announcer = type("Child", (), {"pid": 7}), Heard()
    found._weight_version, found._num_starts, found._why, found._notes, found._url = "3", 4, "w", ("n",), "u"
    full = status(found)
    assert (full.pid, full.instance, full.weight_version, full.num_starts) == (7, "instance-1", "3", 4)
    assert (full.why, full.notes, full.url) == ("w", ("n",), "u")
    assert found.spec() == found._spec.encode()


def test_news_are_announced_once_and_a_version_that_is_not_told_stays(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replica_of(asked, monkeypatch)
    found._look()  # a router, or before the announcer is there
    assert asked.requests == []
    announcer = found._announcer = Heard()
    for answer in (
        (200, b'{"weight_version":"1"}'),
        (200, b'{"weight_version":"1"}'),
        (503, b'{"weight_version":"9"}'),
    ):
        asked.answer = answer
        found._look()
    assert announcer.states == [("instance-1", State.READY, "1")]
    asked.answer = (200, b'{"weight_version":"2"}')
    found._look()
    asked.answer = (200, b"{}")
    found._look()
    assert announcer.states[1:] == [("instance-1", State.READY, "2"), ("instance-1", State.READY, "")]
    assert {path for _, path, *_ in asked.requests} == {"/server_info"}


def test_update_that_fails_is_not_loaded_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replica_of(asked, monkeypatch)
    found._announcer = Heard()
    before = found._update = Update(path="/old", num_updates=1)
    asked.answer = (400, b'{"error":{"message":"no"}}')
    answer = msgspec.msgpack.decode(found.update_weights(Update(path="/new", num_updates=2).encode()), type=Updated)
    assert (answer.problem, found._update) == ("no", before)
    asked.answer = (200, b'{"weight_version":"2"}')
    answer = msgspec.msgpack.decode(found.update_weights(Update(path="/new", num_updates=2).encode()), type=Updated)
    assert (answer.problem, answer.status.weight_version) == ("", "2")
    assert found._update == Update(path="/new", num_updates=2)

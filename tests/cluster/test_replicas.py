"""What an actor's process is given and asked, by each field, and what becomes of its log. Without Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError
from forebay.cluster import process, replica
from forebay.cluster import surroundings as surroundings_module
from forebay.cluster.messages import LogPart, LogRequest, Needs, Phase, Update, Updated
from forebay.cluster.process import Child, Log, log_folder
from forebay.cluster.surroundings import Surroundings
from forebay.route import restarts
from forebay.route.announcement import Role, State
from tests.cluster.test_replica import FAKE, Heard, fake, heard, is_running, make, status, wait_for
from tests.deadlines import HANGS_S, wait_until

__all__ = ["fake"]  # a fixture
OWN = Surroundings(niceness=0, oom_score_adj=0)


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def child(sock: socket.socket, tmp_path: Path, *words: str) -> Child:
    return Child("serve", words, sock, Log(tmp_path / "server-1.log"))


def test_child_has_its_own_session_its_words_and_no_input(listening: socket.socket, tmp_path: Path) -> None:
    found = child(listening, tmp_path, "--a", "--b")
    assert found.pid == 0
    found.end(0.0)  # there is none yet
    before = len([*Path("/proc/self/fd").iterdir()])
    found.start(OWN, {"PATH": os.environ["PATH"], "MARK": "1"})
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    wait_until(lambda: "started with --a --b" in found._log.last_lines(1))
    assert found.wait(0.0) is None
    folder = Path(f"/proc/{found.pid}")
    words = (folder / "cmdline").read_text().split("\0")
    assert words[1:4] == [str(FAKE), "serve", OWN.as_text()]
    assert os.getsid(found.pid) == found.pid
    assert os.readlink(folder / "fd" / "0") == "/dev/null"
    assert os.readlink(folder / "fd" / "1") == os.readlink(folder / "fd" / "2") == str(found._log.path)
    assert b"MARK=1" in (folder / "environ").read_bytes().split(b"\0")
    found.end(HANGS_S)
    assert found.wait(0.0) == -signal.SIGTERM
    found.close()
    assert process.ENTRY != ("-P", "-m", "forebay.cluster.member")  # the fake's
    with pytest.raises(OSError):
        found.close()  # which has closed both ends


def test_child_that_does_not_listen_to_sigterm_is_killed(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(3600)"
    monkeypatch.setattr(process, "ENTRY", ["-c", code])
    found = child(listening, tmp_path)
    found.start(OWN, {})
    wait_until(lambda: found._log.last_lines(1) == "on")
    found.end(0.05)
    assert found.wait(0.0) == -signal.SIGKILL
    found.close()


def test_entry_is_the_member_s_module_without_the_folder_of_the_caller() -> None:
    code = "from forebay.cluster import process; print(*process.ENTRY, process.MAX_LOG_BYTES)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"-P -m forebay.cluster.member {64 << 20}\n"


def test_log_that_is_not_there_is_empty_and_a_long_one_ends_with_its_last_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "a" / "b" / "server-1.log")
    assert (log.read(LogRequest(offset=9)).text, log.read(LogRequest(offset=9)).next_offset) == (b"", 0)
    log.trim()
    log.path.write_bytes(b"first\n" + b"x" * (64 << 10))
    assert log.last_lines(2) == "x" * (64 << 10)  # of 64 KiB
    log.path.write_bytes(b"0123456789")
    whole = b"0123456789"
    for offset, text in ((-4, b"6789"), (-20, whole), (0, whole), (3, b"3456789"), (10, b""), (11, whole)):
        assert log.read(LogRequest(offset=offset)).text == text
    assert log.read(LogRequest(offset=2, max_bytes=3)) == LogPart(text=b"234", next_offset=5)
    descriptor = log.open()
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    assert log_folder() == Path(os.environ["HOME"]) / ".cache" / "forebay" / "cluster" / "logs"


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

"""Scorecard I-1 and J-1 with a process of its own: signals, and what listens where."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from forebay.http.listen import OTHER_FILES, SAME_SIGNAL_S, fit_file_limit
from tests import loopback
from tests.deadlines import HANGS_S, wait_until
from tests.integration.forked import Forked, stock
from tests.server.conftest import CONFIG

MODULE = "tests.server.signalled"
ASK = b'{"messages": [{"role": "user", "content": "hello"}]}'


Process = tuple[Forked, str]


@contextmanager
def started(before: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a new interpreter, which runs `before` first, and its address."""
    code = f"{before}\nfrom {MODULE} import main\nmain()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        url = child.stdout.readline().strip()
        assert url, "it ended before it was ready"
        yield child, url
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the forked server writes."""
    return tmp_path / "log"


@pytest.fixture
def process(log: Path) -> Iterator[Process]:
    """A forked server and its address."""
    with log.open("wb") as output:
        child = stock().start(["-m", MODULE], os.environ, output=output.fileno(), own_session=True)
    try:
        wait_until(lambda: "\n" in log.read_text() or child.poll() is not None, log.read_text)
        yield child, log.read_text().splitlines()[0]
    finally:
        child.kill()
        child.wait(HANGS_S)


def hold_a_request(url: str) -> socket.socket:
    """A request that never gets a token."""
    sock = socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=HANGS_S)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock.sendall(head + b"content-length: %d\r\n\r\n" % len(ASK) + ASK)
    wait_until(lambda: loopback.get(f"{url}/debug/state").json()["num_running"] == 1)
    return sock


def answer(sock: socket.socket) -> bytes:
    """All of it: the server closes the connection when it ends."""
    return b"".join(iter(lambda: sock.recv(4096), b""))


def test_a_signal_to_an_idle_server_ends_it_without_a_drain(process: Process) -> None:
    child, _ = process
    child.send_signal(signal.SIGTERM)
    assert child.wait(HANGS_S) == 0


def test_a_second_signal_does_not_wait_for_the_drain(process: Process) -> None:
    child, url = process
    with hold_a_request(url) as sock:
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: loopback.get(f"{url}/ready").status_code == 503)
        time.sleep(2 * SAME_SIGNAL_S)  # sooner it would be taken for the same signal
        child.send_signal(signal.SIGTERM)
        assert child.wait(HANGS_S) == 0
        assert b"shutting_down" in answer(sock)


def test_a_hang_up_drains_as_any_request_to_end_does(process: Process) -> None:
    child, url = process
    with hold_a_request(url) as sock:
        child.send_signal(signal.SIGHUP)
        wait_until(lambda: loopback.get(f"{url}/ready").json()["reason"] == "draining")
        assert loopback.get(f"{url}/debug/state").json()["num_running"] == 1
        child.send_signal(signal.SIGQUIT)
        assert b"shutting_down" in answer(sock)
    assert child.wait(HANGS_S) == 0


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1, signal.SIGXCPU])
def test_other_ending_signals_stop_the_server_at_once_with_typed_errors(
    process: Process, log: Path, number: int
) -> None:
    child, url = process
    with hold_a_request(url) as sock:
        child.send_signal(number)
        assert b"shutting_down" in answer(sock)
    assert child.wait(HANGS_S) == 0
    assert f"forced_exit signal={signal.Signals(number).name}" in log.read_text()


@pytest.fixture(scope="module")
def restricted() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server under nohup that may open few files, and its address."""
    ignores = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with started(f"{ignores}; import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))") as server:
        yield server


@pytest.mark.long
def test_what_nohup_ignores_stays_ignored(restricted: tuple[subprocess.Popen[str], str]) -> None:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{restricted[0].pid}/status").read_text().splitlines())
    assert int(status["SigIgn"], 16) >> (signal.SIGHUP - 1) & 1


def test_there_are_no_more_connections_than_files_may_be_open(restricted: tuple[subprocess.Popen[str], str]) -> None:
    """One over that could not be accepted: its client would wait for ever."""
    child, url = restricted
    info = loopback.get(f"{url}/server_info").json()
    assert info["server"]["max_connections"] == 64
    assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[0] == 128


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most"),
    [
        (64, 4096, 1000 * 2 + OTHER_FILES, 1000),
        (4096, 4096, None, 1000),  # it suffices
        (64, -1, 1000 * 2 + OTHER_FILES, 1000),
        (-1, -1, None, 1000),
        (64, 1000, 1000, 1000 - OTHER_FILES),
        (64, 128, 128, 64),
    ],
)
def test_file_limit_is_raised_and_fewer_connections_are_logged(
    soft: int, hard: int, raised: int | None, most: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """-1 is no limit."""
    limits: list[tuple[int, int]] = []
    fake = SimpleNamespace(
        RLIMIT_NOFILE=7,
        RLIM_INFINITY=-1,
        getrlimit=lambda kind: (soft, hard),
        setrlimit=lambda kind, both: limits.append(both),
    )
    monkeypatch.setattr("forebay.http.listen.resource", fake)
    assert fit_file_limit(replace(CONFIG, max_connections=1000)).max_connections == most
    assert limits == ([(raised, hard)] if raised else [])
    fewer = [line for line in caplog.messages if line.startswith(f"fewer_connections max_connections={most} ")]
    assert len(fewer) == (most < 1000)


@pytest.mark.long
def test_there_is_one_listener_and_it_is_on_loopback(process: Process) -> None:
    child, url = process
    sockets = {os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")}
    listening = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{child.pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    listening.append(fields[1])
    assert listening == [f"0100007F:{httpx.URL(url).port:04X}"]

"""Scorecard E-3, H-2, H-3: crowds, clients that go away, clients that are slow."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import socket
from collections import Counter

import pytest

from forebay.http.errors import MESSAGES, RESPONSES
from tests.server.crowds import HEALTH, ask_at_once, drip, read_all, request
from tests.server.fake_engine import FakeEngine
from tests.server.process_status import MIB, forget_peak, num_fds, peak_rss_bytes, rss_bytes

CHAT = "/v1/chat/completions"
# What each dialect's body has otherwise than a chat's.
IN = {
    CHAT: {},
    "/v1/completions": {"messages": None, "prompt": "hello"},
    MESSAGES: {"model": "tiny"},
    RESPONSES: {"messages": None, "input": "hello", "max_tokens": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("total", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_crowd_fills_the_house_and_the_rest_get_429(launch, total: int) -> None:
    server = launch(lambda: FakeEngine(manual=True, max_running=64, max_queued=256), max_connections=20_000)
    rss = rss_bytes()
    forget_peak()
    crowd = asyncio.run(ask_at_once(server, total))
    assert peak_rss_bytes() - rss <= 200 * MIB
    assert crowd.taken == 320
    assert crowd.refused == {429: total - 320}
    assert server.engine.peak == 320
    server.until(lambda: not server.engine.running)
    with server.client() as http:
        assert http.get("/debug/state").json()["server"]["num_inside"] == 0
        assert http.post("/tokenize", json={"prompt": "hello"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "n"), [(CHAT, 1), (CHAT, 3), (MESSAGES, 1), (RESPONSES, 1)])
@pytest.mark.parametrize("steps", [0, 1, 10])
def test_a_client_that_leaves_aborts_its_request_at_the_engine(
    launch, stream: bool, path: str, n: int, steps: int
) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    sock = server.connect()
    sock.sendall(request(path, stream=stream, **{**IN[path], **({"n": n} if path == CHAT else {})}))
    server.until(lambda: len(server.engine.running) == n)
    for _ in range(steps):
        server.call(server.engine.step)
    sock.close()
    server.until(lambda: not server.engine.running)
    assert len(server.engine.aborted) == n
    with server.client() as http:
        assert http.get("/debug/state").json()["server"]["num_inside"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_aborts_at_random_moments_leave_nothing_running(launch, count: int) -> None:
    server = launch(lambda: FakeEngine(manual=True, max_running=2))
    engine = server.engine
    rng = random.Random(5)
    for _ in range(count):
        path = rng.choice([CHAT, "/v1/completions", MESSAGES, RESPONSES])
        ask = {**IN[path]}
        if path == "/v1/completions":
            ask |= {"prompt": rng.choice([["a", "b"], "hello"])}
        prompts = len(ask["prompt"]) if isinstance(ask.get("prompt"), list) else 1
        n, steps = rng.randint(1, 3), rng.choice([0, 0, 1, 2, 10, 30])
        if path in (MESSAGES, RESPONSES):
            n = 1
        else:
            ask["n"] = n
        aborted, submitted = len(engine.aborted), len(engine.submitted)
        sock = server.connect()
        sock.sendall(request(path, stream=rng.random() < 0.5, **ask))
        server.until(lambda before=submitted, more=n * prompts: len(engine.submitted) == before + more)
        for _ in range(steps):
            server.call(engine.step)
        sock.close()
        server.until(lambda: not engine.running)
        assert len(engine.aborted) == aborted + n * prompts
        sent = [stream.sent for stream in engine.submitted[submitted:]]
        server.call(engine.step)
        assert [stream.sent for stream in engine.submitted[submitted:]] == sent
    with server.client() as http:
        assert http.get("/debug/state").json()["server"]["num_inside"] == 0


def test_a_client_that_leaves_before_its_body_is_whole_costs_nothing(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    for size in (40, len(request()) - 3):
        with server.connect() as sock:
            sock.sendall(request()[:size])
    with server.client() as http:
        assert http.get("/health").status_code == 200
    assert server.engine.submitted == []


def test_many_slow_senders_hit_the_deadline_and_delay_no_other_client(launch) -> None:
    server = launch(header_timeout_s=1.0, body_timeout_s=1.0)
    with server.client() as http:
        assert http.get("/health").status_code == 200
    fds = num_fds()
    answers, latencies = asyncio.run(drip(server, 600))
    kinds = Counter(answer[:12] for answer in answers)
    # A deadline that every byte moves on would let them come to their end and be answered.
    assert set(kinds) <= {b"HTTP/1.1 408", b"reset"}
    assert kinds[b"HTTP/1.1 408"] >= 100  # all that were silent: a byte that meets a closed socket resets it
    assert latencies  # /health was answered while they were there
    server.until(lambda: num_fds() <= fds)


def test_dripping_bytes_do_not_extend_the_deadline(launch) -> None:
    """A header that is too long after thirteen seconds, if nothing cuts it before."""
    server = launch(header_timeout_s=0.4)
    with server.connect() as sock, contextlib.suppress(OSError):
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        while not select.select([sock], [], [], 0.05)[0]:
            sock.sendall(b"x" * 64)
        answer = sock.recv(4096)
        assert not answer or answer.startswith(b"HTTP/1.1 408")


def test_idle_connections_are_closed(launch) -> None:
    server = launch(keep_alive_s=0.2)
    with server.connect() as sock:
        sock.sendall(HEALTH)
        assert b"200 OK" in read_all(sock)


@pytest.mark.parametrize("behind", [b"", HEALTH, HEALTH[:20]], ids=["nothing", "another request", "half of one"])
def test_connections_answered_before_their_body_ended_are_closed_when_idle(launch, behind: bytes) -> None:
    server = launch(keep_alive_s=0.2, header_timeout_s=0.2)
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: a/b\r\nContent-Length: 6\r\n\r\nabc")
        assert sock.recv(1).startswith(b"H")  # of 415
        sock.sendall(b"def" + behind)
        rest = read_all(sock)
    assert (b"200 OK" in rest) == (behind == HEALTH)


@pytest.mark.quick(1)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_reader_that_stops_reading_is_cut_and_its_request_aborted(launch, path: str) -> None:
    server = launch(lambda: FakeEngine(context_length=1 << 22), max_stream_chunks=64)
    with server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        most = {} if path == RESPONSES else {"max_tokens": 1 << 21}
        sock.sendall(request(path, stream=True, **{**IN[path], **most}))
        server.until(lambda: bool(server.engine.aborted))
    with server.client() as http:
        assert http.get("/health").status_code == 200

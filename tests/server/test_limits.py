"""Scorecard E-3, H-2, H-3: crowds, clients that go away, clients that are slow."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter

import pytest

from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100_000 // 100}


def request(path: str = "/v1/chat/completions", **body: object) -> bytes:
    content = json.dumps({**ASK, **body}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        "\r\n\r\n"
    ).encode() + content


def test_ten_thousand_at_once_fill_the_house_and_the_rest_get_429(launch) -> None:
    server = launch(lambda: FakeEngine(manual=True, max_running=64, max_queued=256), max_connections=20_000)
    taken, refused, latencies = asyncio.run(_crowd(server, 10_000, 320))
    assert taken == 320
    assert refused == {429: 9_680}
    assert server.engine.peak == 320
    latencies.sort()
    assert latencies[len(latencies) // 2] < 0.2
    server.until(lambda: not server.engine.running, 10)


async def _crowd(server: Running, total: int, cap: int) -> tuple[int, Counter[int], list[float]]:
    """Send `total` requests over kept connections, 250 at a time; those that are taken stay open."""
    refused: Counter[int] = Counter()
    latencies: list[float] = []
    held: list[asyncio.StreamWriter] = []
    left = iter(range(total))

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in left:
            writer.write(request(stream=True))
            started = time.perf_counter()
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3 if refused.total() < 9_000 else 0.5)
            except TimeoutError:
                held.append(writer)  # taken: no token has been made yet
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                continue
            latencies.append(time.perf_counter() - started)
            refused[int(head.split()[1])] += 1
            assert b"retry-after: 1" in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b'"queue_full"' in await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(worker() for _ in range(cap + 64)))
    for writer in held:
        writer.close()
    return len(held), refused, latencies


def test_connections_over_the_cap_are_told_so(launch) -> None:
    server = launch(max_connections=2)
    first, second, third = (server.connect() for _ in range(3))
    with first, second, third:
        third.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert third.recv(4096).startswith(b"HTTP/1.1 429")
        second.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 10])
def test_abort_reaches_the_engine_within_a_second(launch, stream: bool, n: int, steps: int) -> None:
    server = launch(lambda: FakeEngine(manual=True))
    sock = server.connect()
    sock.sendall(request(stream=stream, n=n))
    server.until(lambda: len(server.engine.running) == n)
    for _ in range(steps):
        server.call(server.engine.step)
    started = time.perf_counter()
    sock.close()
    server.until(lambda: not server.engine.running)
    assert time.perf_counter() - started < 1
    assert len(server.engine.aborted) == n
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


def test_slow_headers_and_bodies_meet_an_absolute_deadline(launch) -> None:
    server = launch(header_timeout_s=0.3, body_timeout_s=0.3)
    drips = [server.connect() for _ in range(50)]
    whole = request()
    halves = [b"GET /health HTTP/1.1\r\nhost: local", b"", whole[: whole.index(b"{") + 3]]
    for i, sock in enumerate(drips):
        sock.sendall(halves[i % 3])
    started = time.perf_counter()
    answers = [_read_all(sock) for sock in drips]
    assert time.perf_counter() - started < 3
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    server.until(lambda: True)
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_dripping_bytes_do_not_extend_the_deadline(launch) -> None:
    server = launch(header_timeout_s=0.4)
    with server.connect() as sock:
        sock.settimeout(0.05)
        started = time.perf_counter()
        answer = b""
        while not answer and time.perf_counter() - started < 5:
            try:
                sock.sendall(b"G" if time.perf_counter() - started < 0.01 else b"E")
                answer = sock.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
        assert time.perf_counter() - started < 2


def test_idle_connections_are_closed(launch) -> None:
    server = launch(keep_alive_s=1.0)
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        started = time.perf_counter()
        assert b"200 OK" in _read_all(sock)
        assert time.perf_counter() - started < 4


def test_a_reader_that_stops_reading_is_cut_and_its_request_aborted(launch) -> None:
    server = launch(lambda: FakeEngine(context_length=1 << 22), max_stream_chunks=64)
    with server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request(stream=True, max_tokens=1 << 21))
        server.until(lambda: bool(server.engine.aborted), 20)
    with server.client() as http:
        assert http.get("/health").status_code == 200


def _read_all(sock: socket.socket) -> bytes:
    data = b""
    while block := sock.recv(65536):
        data += block
    sock.close()
    return data

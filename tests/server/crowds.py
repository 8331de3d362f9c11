"""Many clients at once, of a server in this process; `benchmarks/limits.py` looks at the times they saw."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.deadlines import HANGS_S
from tests.server.conftest import Running

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
WORKERS = 80  # client and server share an interpreter: more at a time would measure the client's own queue


@dataclass
class Crowd:
    """What became of it, and how long each answer took."""

    taken: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)


def request(path: str = "/v1/chat/completions", **body: object) -> bytes:
    merged = {key: value for key, value in {**ASK, **body}.items() if value is not None}
    content = json.dumps(merged).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        "\r\n\r\n"
    ).encode() + content


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while block := sock.recv(65536):
        data += block
    return data


async def ask_at_once(server: Running, total: int) -> Crowd:
    """Send `total` requests, `WORKERS` at a time; those that are taken stay open, unanswered, and make room for
    others."""
    crowd = Crowd()
    held: list[asyncio.StreamWriter] = []
    left = iter(range(total))

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for label in left:
            writer.write(request(stream=True, seed=label))
            started = time.perf_counter()
            reading = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
            while not (await asyncio.wait([reading], timeout=0.2))[0] and label not in _taken(server):
                pass
            if not reading.done():
                reading.cancel()
                held.append(writer)
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                continue
            head = await reading
            crowd.latencies_s.append(time.perf_counter() - started)
            crowd.refused[int(head.split()[1])] += 1
            assert b"retry-after: 1" in head
            assert b'"queue_full"' in await reader.readexactly(_length(head))
        writer.close()

    async with asyncio.timeout(HANGS_S):
        await asyncio.gather(*(worker() for _ in range(WORKERS)))
    for writer in held:
        writer.close()
    crowd.taken = len(held)
    return crowd


def _taken(server: Running) -> set[int]:
    """The seeds of the requests that the engine got, by which the crowd knows its own."""
    return {stream.params.seed for stream in server.engine.submitted[:]}


def _length(head: bytes) -> int:
    return int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


async def drip(server: Running, count: int) -> tuple[list[bytes], list[float]]:
    """A byte of the headers or of the body every 50 ms from most of `count` clients, nothing at all from every fourth;
    /health all the while. The first block that each client was answered with, and the seconds that each answer of
    /health took which came before the last of these."""
    whole = request()
    starts = [0, 0, whole.index(b"{")]
    latencies: list[float] = []

    async def first_block(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(4096)
        except OSError:
            return b"reset"

    async def client(i: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        at = starts[i % 3]
        writer.write(whole[:at])
        answer = asyncio.ensure_future(first_block(reader))
        while not (await asyncio.wait([answer], timeout=0.05))[0]:
            if i % 4:
                writer.write(whole[at : at + 1])
                at += 1
        writer.close()
        return answer.result()

    async def ask_health(done: asyncio.Future[list[bytes]]) -> None:
        while not done.done():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            started = time.perf_counter()
            writer.write(HEALTH)
            head = await first_block(reader)
            # A machine that runs us seldom makes us as late with our request as those who drip.
            if head != b"reset" and not head.startswith(b"HTTP/1.1 408"):
                assert head.startswith(b"HTTP/1.1 200")
                if not done.done():
                    latencies.append(time.perf_counter() - started)
            writer.close()
            await asyncio.wait([done], timeout=0.01)

    async with asyncio.timeout(HANGS_S):
        done = asyncio.gather(*(client(i) for i in range(count)))
        await asyncio.gather(done, ask_health(done))
    return done.result(), latencies

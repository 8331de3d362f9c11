"""What a client costs that reads many streams: the one of `forebay bench serve`, and httpx2's.

    python -m benchmarks.http_clients [--streams 64] [--tokens 200] [--repeats 5]

Each client reads the same streams of a scripted engine behind the real server, which has a process of its own and
generates as fast as it can. Prints tokens per second, and microseconds of the client's CPU per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import uvloop

from forebay.base.http_client import Origin
from forebay.bench.load import Load, Target, run_load
from forebay.http.listen import bind
from forebay.server.serve import serve
from tests.server.conftest import CONFIG, MODEL
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

Client = Callable[[int, int, int], Awaitable[tuple[float, float]]]


async def serve_until_killed() -> None:
    sock = bind(CONFIG)
    print(sock.getsockname()[1], flush=True)
    await serve(CONFIG, MODEL, FakeEngine(interval_s=1e-3, max_running=1024), tiny_tokenizer(), sock=sock)


def _target(port: int, tokens: int) -> Target:
    return Target(Origin(f"http://127.0.0.1:{port}"), MODEL.name, tokens, True)


def _prompts(streams: int) -> list[list[int]]:
    return [[300 + i] * 128 for i in range(streams)]


async def own(port: int, streams: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of all streams and of this process's CPU, with our client."""
    done = await run_load(_target(port, tokens), Load(_prompts(streams), float("inf"), streams, 0), lambda: None)
    assert all(sample.num_output_tokens == tokens for sample in done.samples)
    return done.seconds, done.cpu_seconds


async def theirs(port: int, streams: int, tokens: int) -> tuple[float, float]:
    """As `own`, with httpx2: reads are kept with their times and parsed at the end, as ours are."""
    limits = httpx2.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=None) as client:
        bodies = [json.loads(_target(port, tokens).request(p).partition(b"\r\n\r\n")[2]) for p in _prompts(streams)]

        async def one(body: dict[str, Any]) -> bool:
            reads: list[tuple[float, bytes]] = []
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                reads += [(time.perf_counter(), data) async for data in answer.aiter_raw()]
            return b'"completion_tokens":%d,' % tokens in b"".join(data for _, data in reads)

        started, cpu = time.perf_counter(), time.process_time()
        complete = await asyncio.gather(*map(one, bodies))
        spent = time.perf_counter() - started, time.process_time() - cpu
    assert all(complete)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        uvloop.run(serve_until_killed())
        return
    command = [sys.executable, "-m", "benchmarks.http_clients", "--server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port, count = int(server.stdout.readline()), args.streams * args.tokens
        clients: dict[str, Client] = {"own": own, "httpx2": theirs}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
        try:
            for _ in range(args.repeats):
                for name, client in clients.items():
                    found[name].append(uvloop.run(client(port, args.streams, args.tokens)))  # type: ignore[arg-type]
        finally:
            server.terminate()
    for name, spent in found.items():
        seconds, cpu = (min(each) for each in zip(*spent, strict=True))
        print(f"{name:7} {count / seconds:9.0f} tokens/s  {cpu / count * 1e6:6.2f} us of CPU per token")


if __name__ == "__main__":
    main()

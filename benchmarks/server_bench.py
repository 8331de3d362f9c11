"""CPU time of the server process per streamed token, with the scripted engine of the tests instead of a model.

    python benchmarks/server_bench.py [--streams 64] [--rate 20] [--seconds 5]

A child process is the client, so that `time.process_time` here is the server's alone (the scripted engine's few
microseconds included). Prints us/token and the share of one core at that rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

from forebay.server.serve import bind, serve
from tests.server.conftest import CONFIG, MODEL
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer


def client(port: int, streams: int, tokens: int) -> None:
    """Open the streams and read them to their ends."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        seen = b""
        while b"[DONE]" not in seen:
            block = await reader.read(1 << 16)
            assert block, "the server closed the stream"
            seen = seen[-16:] + block
        writer.close()

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(streams)))

    uvloop.run(run())


async def measure(streams: int, rate: float, seconds: float) -> dict[str, float]:
    tokens = int(rate * seconds)
    engine = FakeEngine(interval_s=1 / rate, max_running=streams)
    sock: socket.socket = bind(CONFIG)
    stop, ready = asyncio.Event(), asyncio.Event()
    tokenizer = tiny_tokenizer()
    running = asyncio.create_task(
        serve(CONFIG, MODEL, engine, tokenizer, sock=sock, on_ready=lambda _: ready.set(), stop=stop)
    )
    await ready.wait()
    arguments = [__file__, "--client", str(sock.getsockname()[1]), "--streams", str(streams), "--tokens", str(tokens)]
    cpu, wall = time.process_time(), time.perf_counter()
    child = await asyncio.to_thread(subprocess.run, [sys.executable, *arguments], check=True)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert child.returncode == 0
    stop.set()
    await running
    total = sum(stream.sent for stream in engine.submitted)
    return {"tokens": total, "us_per_token": cpu / total * 1e6, "core_share": cpu / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second and stream")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client, arguments.streams, arguments.tokens)
        return
    result = uvloop.run(measure(arguments.streams, arguments.rate, arguments.seconds))
    print(json.dumps({"streams": arguments.streams, **{key: round(value, 3) for key, value in result.items()}}))


if __name__ == "__main__":
    main()

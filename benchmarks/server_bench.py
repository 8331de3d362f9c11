"""CPU time of the server process per request and per streamed token, with the scripted engine of the tests.

    python benchmarks/server_bench.py [--streams 64 1] [--rate 50] [--tokens 200] [--repeats 3]

A child process is the client, so that `time.process_time` here is the server's alone (the scripted engine's microsecond
per token included). A request's cost is that of streams of one token; a token's that of longer ones beyond it. Prints
the least of the repeats, and what the tokens take of one core at that rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

from forebay.server.serve import bind, serve
from tests.server.conftest import CONFIG, MODEL
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer


def client(port: int) -> None:
    """For each line `STREAMS TOKENS` of standard input, open the streams, read them to their ends, and say so."""

    async def one(tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        seen = b""
        while b"[DONE]" not in seen:
            block = await reader.read(1 << 16)
            assert block, "the server closed the stream"
            seen = seen[-16:] + block
        writer.close()

    async def many(streams: int, tokens: int) -> None:
        await asyncio.gather(*(one(tokens) for _ in range(streams)))

    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        uvloop.run(many(streams, tokens))
        print("done", flush=True)


async def cpu_seconds(child: subprocess.Popen[str], streams: int, tokens: int) -> float:
    """Of this process, while the client reads that many streams."""

    def ask(to: IO[str], back: IO[str]) -> None:
        to.write(f"{streams} {tokens}\n")
        to.flush()
        assert back.readline() == "done\n"

    assert child.stdin is not None
    assert child.stdout is not None
    before = time.process_time()
    await asyncio.to_thread(ask, child.stdin, child.stdout)
    return time.process_time() - before


async def measure(numbers: list[int], rate: float, tokens: int, repeats: int) -> None:
    engine = FakeEngine(interval_s=1 / rate, max_running=max(numbers))
    sock = bind(CONFIG)
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        serve(CONFIG, MODEL, engine, tiny_tokenizer(), sock=sock, on_ready=lambda _: ready.set(), stop=stop)
    )
    await ready.wait()
    command = [sys.executable, __file__, "--client", str(sock.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for streams in numbers:
            await cpu_seconds(child, streams, 2)  # what is done once
            one = min([await cpu_seconds(child, streams, 1) for _ in range(repeats)])
            all_of_them = min([await cpu_seconds(child, streams, tokens) for _ in range(repeats)])
            per_token = (all_of_them - one) / (streams * (tokens - 1))
            figures = {"us_per_request": one / streams * 1e6, "us_per_token": per_token * 1e6}
            rounded = {name: round(value, 1) for name, value in figures.items()}
            print(json.dumps({"streams": streams, **rounded, "core_share": round(per_token * rate * streams, 4)}))
        assert child.stdin is not None
        child.stdin.close()
    stop.set()
    await running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second and stream")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client)
    else:
        uvloop.run(measure(arguments.streams, arguments.rate, arguments.tokens, arguments.repeats))


if __name__ == "__main__":
    main()

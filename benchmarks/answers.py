"""CPU time of the server process per streamed token where answers are read for calls and thinking, beside plain chats.

    python -m benchmarks.answers [--streams 16] [--rate 50] [--tokens 200] [--repeats 5]

The tests' engine behind the real server; clients in a child process read and count. A token's cost is that of long
streams beyond those of one token; plain and read ones take turns, and each figure is the least of the repeats. Target:
at most 1.2 times as much where answers are read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace

import uvloop

from forebay.base.http_client import Origin
from forebay.bench.load import send
from forebay.http.listen import bind
from forebay.server.serve import serve
from forebay.text.answers.probes import find_formats
from tests.server.conftest import CONFIG, MODEL
from tests.server.crowds import ASK
from tests.server.fake_engine import FakeEngine
from tests.text.answers.templates import QWEN3
from tests.text.tiny_tokenizer import tiny_tokenizer

TARGET = 1.2
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
WISHES = {"plain": {}, "read": {"tools": [TOOL]}}


async def read(origin: Origin, kind: str, streams: int, tokens: int) -> int:
    """Return the number of events of all streams."""
    body = {**ASK, "stream": True, "max_tokens": tokens, "ignore_eos": True, **WISHES[kind]}
    answers = await asyncio.gather(*(send(origin, "/v1/chat/completions", body) for _ in range(streams)))
    assert not any(answer.failure for answer in answers), answers
    return sum(len(answer.arrivals) for answer in answers)


def client(port: int) -> None:
    """For each line `KIND STREAMS TOKENS` of standard input, read these streams and print how many events they had."""
    for line in sys.stdin:
        kind, streams, tokens = line.split()
        print(uvloop.run(read(Origin(f"http://127.0.0.1:{port}"), kind, int(streams), int(tokens))), flush=True)


async def cost(child: subprocess.Popen[str], kind: str, streams: int, tokens: int) -> float:
    """CPU seconds of this process."""
    before = time.process_time()
    await asyncio.to_thread(ask, child, f"{kind} {streams} {tokens}")
    return time.process_time() - before


def ask(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    assert int(child.stdout.readline()) > 0


async def measure(streams: int, rate: float, tokens: int, repeats: int) -> None:
    tokenizer = tiny_tokenizer(template=QWEN3.replace("<think>", "<thought>"))  # without tools nothing is to be read
    model = replace(MODEL, answers=find_formats(tokenizer))
    engine, sock = FakeEngine(interval_s=1 / rate, max_running=streams), bind(CONFIG)
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        serve(CONFIG, model, engine, tokenizer, sock=sock, on_ready=lambda _: ready.set(), stop=stop)
    )
    await ready.wait()
    command = [sys.executable, "-m", "benchmarks.answers", "--client", str(sock.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        found: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind in WISHES for n in (1, tokens)}
        for number in range(repeats + 1):
            for (kind, n), costs in found.items():
                costs += [await cost(child, kind, streams, n)] if number else []
        assert child.stdin is not None
        child.stdin.close()
    least = {key: min(costs) for key, costs in found.items()}
    per_token = {kind: (least[kind, tokens] - least[kind, 1]) / (streams * (tokens - 1)) * 1e6 for kind in WISHES}
    print(json.dumps({f"{kind}_us_per_token": round(us, 1) for kind, us in per_token.items()}))
    print(f"read / plain: {per_token['read'] / per_token['plain']:.2f} (target {TARGET})")
    stop.set()
    await running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second and stream")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client)
    else:
        uvloop.run(measure(arguments.streams, arguments.rate, arguments.tokens, arguments.repeats))


if __name__ == "__main__":
    main()

"""CPU time of the server process and of the load client, per request and per streamed token, with a scripted engine.

    python benchmarks/server_bench.py [--streams 64 16] [--rate 50] [--tokens 200] [--repeats 3]

`forebay bench serve`'s client runs in a child process, so that `time.process_time` here is the server's alone (the
tests' engine and its few microseconds per token included). A request's cost is that of streams of one token; a token's
that of longer ones beyond it. Each is the least of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

from forebay.base.http_client import Origin
from forebay.bench.load import Load, Target, run_load
from forebay.http.listen import bind
from forebay.server.serve import serve
from tests.server.conftest import CONFIG, MODEL
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer


class Cost(NamedTuple):
    """CPU seconds of the two processes while streams are sent and read."""

    server: float
    client: float

    def beyond(self, other: Cost, count: int) -> Cost:
        """What each of `count` costs that `other` did not have."""
        return Cost((self.server - other.server) / count, (self.client - other.client) / count)


def client(port: int) -> None:
    """For each line `STREAMS TOKENS` of standard input, send the load and print the CPU seconds that it took here."""
    origin = Origin(f"http://127.0.0.1:{port}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            streams, tokens = map(int, line.split())
            load = Load([[300 + i] * 128 for i in range(streams)], float("inf"), streams, seed=0)
            done = runner.run(run_load(Target(origin, MODEL.name, tokens, True), load, lambda: None))
            assert all(sample.num_output_tokens == tokens for sample in done.samples), done.samples[0].error
            print(done.cpu_seconds, flush=True)


async def cost(child: subprocess.Popen[str], streams: int, tokens: int, repeats: int) -> Cost:
    """The least of the repeats, of each."""
    costs = []
    for _ in range(repeats):
        before = time.process_time()
        of_client = await asyncio.to_thread(ask, child, f"{streams} {tokens}")
        costs.append(Cost(time.process_time() - before, float(of_client)))
    return Cost(*map(min, zip(*costs, strict=True)))


def ask(child: subprocess.Popen[str], line: str) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return child.stdout.readline()


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
            await cost(child, streams, 2, 1)  # what is done once
            one = await cost(child, streams, 1, repeats)
            token = (await cost(child, streams, tokens, repeats)).beyond(one, streams * (tokens - 1))
            request = one.beyond(Cost(0.0, 0.0), streams)
            figures = {
                f"{who}_us_per_{what}": round(seconds * 1e6, 1)
                for what, spent in (("request", request), ("token", token))
                for who, seconds in spent._asdict().items()
            }
            print(json.dumps({"streams": streams, **figures}))
        assert child.stdin is not None
        child.stdin.close()
    stop.set()
    await running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 16])
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

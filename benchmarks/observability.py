"""What traces, JSON logs and events of the prefix cache cost a server with 16 streams.

    python -m benchmarks.observability               # the default model, 5 rounds of 64 requests for each server
    python -m benchmarks.observability --rounds 2 --collectors slow down

Servers run side by side, and one at a time has the load: one without traces and events and with the text log; one with
all of it, every request traced and a subscriber of the events; and those of `--collectors`, whose collector of traces
never answers, answers after a second, or is not there. In each round each has the same load, in turn. Reported are the
medians of tokens per second and of the 99th percentile of the time between two tokens, and the medians of their ratios
to the first server's of the same round. Then, for 1,000 requests, the processor time of each server and the bytes of
its log, and the bytes that collector and subscriber got.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import zmq

from benchmarks.servers import START_LIMIT_S, first_token, free_port
from forebay.base.http_client import Origin
from forebay.bench.load import Load, Target, run_load
from forebay.bench.prompts import random_prompts

STREAMS: Final = 16
REQUESTS: Final = 64
PROMPT: Final = 64  # tokens
ANSWER: Final = 48
PER: Final = 1000  # requests
HANGS_S: Final = 3600.0
SLOW_S: Final = 1.0


class Collector:
    """Takes traces over HTTP, counts their bytes, and answers a request after `wait_s` seconds or when it ends."""

    def __init__(self, wait_s: float) -> None:
        self.num_bytes = 0
        collector, self._ended = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.num_bytes += len(self.rfile.read(int(self.headers["content-length"])))
                collector._ended.wait(wait_s)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The address for `--otlp-traces-endpoint`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Answer what hangs, and stop."""
        self._ended.set()
        self._server.shutdown()


class Subscriber:
    """Reads the events of the prefix cache at `address` and counts their bytes."""

    def __init__(self, address: str) -> None:
        self.num_bytes = 0
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(address)
        self._socket.subscribe("")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            self.num_bytes += sum(map(len, self._socket.recv_multipart()))


@dataclass(slots=True)
class Measured:
    """A server that runs: its log, and a tuple of tokens per second and milliseconds for each round."""

    origin: Origin
    process: psutil.Process
    log: Path
    rounds: list[tuple[float, float]] = field(default_factory=list)
    num_requests: int = 0

    def cpu_s(self) -> float:
        """Return the processor seconds of its processes so far."""
        return float(sum(sum(each.cpu_times()[:2]) for each in (self.process, *self.process.children(recursive=True))))


@contextmanager
def running(folder: Path, name: str, words: list[str]) -> Iterator[Measured]:
    """Run `forebay serve` with `words` until the block ends."""
    port, log = free_port(), folder / f"{name}.log"
    command = [sys.executable, "-m", "forebay", "serve", f"--port={port}", *words]
    origin, begin = Origin(f"http://127.0.0.1:{port}"), time.perf_counter()
    with (
        log.open("wb") as written,
        subprocess.Popen(command, stdout=written, stderr=written, env=os.environ) as process,
    ):
        try:
            while not first_token(origin):
                if process.poll() is not None or time.perf_counter() - begin > START_LIMIT_S:
                    raise SystemExit(f"{' '.join(command)} did not start\n{log.read_text()}")
                time.sleep(0.1)
            yield Measured(origin, psutil.Process(process.pid), log)
        finally:
            process.terminate()


def load(server: Measured, seed: int, requests: int) -> None:
    """Put the load of one round on a server, and note its figures."""
    prompts = random_prompts(count=requests, length=PROMPT, prefix_length=0, vocab_size=40_000, seed=seed)
    target = Target(server.origin, "default", ANSWER, ignore_eos=True)
    run = asyncio.run(run_load(target, Load(prompts, float("inf"), STREAMS, seed), lambda: None))
    if errors := [sample.error for sample in run.samples if sample.error]:
        raise SystemExit(f"{len(errors)} of {requests} requests failed, the first with: {errors[0]}")
    between = np.concatenate([np.diff(sample.arrivals) for sample in run.samples])
    tokens = sum(sample.num_output_tokens for sample in run.samples)
    server.rounds.append((tokens / run.seconds, float(np.percentile(between, 99)) * 1e3))
    server.num_requests += requests


def report(servers: dict[str, Measured], before: dict[str, tuple[float, int]]) -> None:
    """Print a row for each server."""
    base = next(iter(servers.values())).rounds
    columns = ("server", "tokens/s", "pairs", "p99 between tokens, ms", "pairs", "CPU s", "log, KB")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, server in servers.items():
        speed, latency = (statistics.median(column) for column in zip(*server.rounds, strict=True))
        pairs = [
            [own / other for own, other in zip(*each, strict=True)] for each in zip(server.rounds, base, strict=True)
        ]
        by_speed, by_latency = (statistics.median(column) for column in zip(*pairs, strict=True))
        per = PER / server.num_requests
        cpu_s, log = server.cpu_s() - before[name][0], server.log.stat().st_size - before[name][1]
        print(
            f"| {name} | {speed:,.0f} | {by_speed:.3f} | {latency:.1f} | {by_latency:.3f} | {cpu_s * per:.1f} "
            f"| {log * per / 1e3:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a round")
    parser.add_argument("--collectors", nargs="*", default=["hangs"], choices=("hangs", "slow", "down"))
    args = parser.parse_args()
    collector, hanging, slow = Collector(0.0), Collector(HANGS_S), Collector(SLOW_S)
    address = f"tcp://127.0.0.1:{free_port()}"
    subscriber = Subscriber(address)
    logs = ["--log-format=json", "--trace-ratio=1"]
    kinds = {
        "off": [],
        "all on": [*logs, f"--kv-events={address}", f"--otlp-traces-endpoint={collector.url}"],
    }
    urls = {"hangs": hanging.url, "slow": slow.url, "down": f"http://127.0.0.1:{free_port()}"}
    for name in args.collectors:
        kinds[f"collector: {name}"] = [*logs, f"--otlp-traces-endpoint={urls[name]}"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        common = ["--context-length=1024", "--served-model-name=default", "--cache-check-rate=0"]
        servers = {
            name: stack.enter_context(
                running(Path(folder), name.replace(": ", "-").replace(" ", "-"), [*common, *words])
            )
            for name, words in kinds.items()
        }
        for server in servers.values():  # graphs, and what is read once
            load(server, 0, STREAMS)
            server.rounds.clear()
            server.num_requests = 0
        collector.num_bytes = subscriber.num_bytes = 0
        before = {name: (server.cpu_s(), server.log.stat().st_size) for name, server in servers.items()}
        for number in range(args.rounds):
            for server in servers.values():
                load(server, 1 + number, args.requests)
        report(servers, before)
        kb = [PER / 1e3 * counted.num_bytes / (args.rounds * args.requests) for counted in (collector, subscriber)]
        print(f"of {PER:,} requests: {kb[0]:,.0f} KB of traces, {kb[1]:,.0f} KB of events")
        for each in (collector, hanging, slow):
            each.close()


if __name__ == "__main__":
    main()

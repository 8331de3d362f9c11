"""What must be quick, measured: `make bench-limits`, on a machine that does nothing else.

Tests assert no clock, since a machine that is busy would fail them. Each figure is compared with its limit in
benchmarks/limits.toml; the exit code says whether all are within.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from forebay.formats.gguf import GgufFile
from forebay.formats.store import find_model
from forebay.text.tokenizer import Tokenizer
from tests.deadlines import HANGS_S, wait_until
from tests.engine.conftest import make_chat_model
from tests.integration.tree import ROOT, Tree, alive, serving
from tests.server.conftest import Running, start
from tests.server.crowds import ask_at_once, drip, request
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizer import tiny_tokenizer

LIMITS: Final = Path(__file__).with_suffix(".toml")
FOREBAY: Final = (sys.executable, "-m", "forebay.cli.main")
SMALL: Final = ("--dtype=float32", "--num-threads=1", "--kv-cache-bytes=32MiB", "--chunked-prefill-size=16")
REPEATS: Final = 3
MIB: Final = 1 << 20

Figures = Iterator[tuple[str, float]]


@contextmanager
def server(make_engine: Callable[[], FakeEngine] = FakeEngine, **changes: Any) -> Iterator[Running]:
    """The HTTP side over a scripted engine, in a thread of this process."""
    with closing(start(tiny_tokenizer(), make_engine, **changes)) as running:
        yield running


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    function()
    return clock() - started


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


# -- the command line and the tokenizer -----------------------------------------------------------------------------


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def help_pages() -> Figures:
    for name, words in (("help_cpu_s", ["--help"]), ("serve_help_cpu_s", ["serve", "--help"])):
        run = partial(subprocess.run, [*FOREBAY, *words], capture_output=True, check=True, cwd=ROOT)
        yield name, min(seconds(run, children_cpu_s) for _ in range(REPEATS))


def tokenizer() -> Figures:
    metadata = GgufFile(find_model(None)).metadata
    build = partial(Tokenizer.from_gguf, metadata)
    yield "tokenizer_cpu_s", min(seconds(build, time.thread_time) for _ in range(REPEATS))


# -- the HTTP side --------------------------------------------------------------------------------------------------


def crowd() -> Figures:
    """Scorecard E-3: 10,000 requests where 320 fit."""
    house = {"manual": True, "max_running": 64, "max_queued": 256}
    with server(lambda: FakeEngine(**house), max_connections=20_000) as running, running.client() as http:
        alone_s = tokenize_s(http)
        seen = asyncio.run(ask_at_once(running, 10_000))
        running.until(lambda: not running.engine.running)
        yield "refused_p99_ms", 1e3 * p99(seen.latencies_s)
        yield "tokenize_after_crowd_ratio", tokenize_s(http) / alone_s


def tokenize_s(http: httpx.Client) -> float:
    """The median time of a request that takes the whole way but the engine."""
    return statistics.median(seconds(lambda: http.post("/tokenize", json={"prompt": "hello"})) for _ in range(101))


def dripping() -> Figures:
    """Scorecard H-3: /health while 600 clients send a byte now and then. They live in this process too."""
    with server(header_timeout_s=1.0, body_timeout_s=1.0) as running:
        _, latencies = asyncio.run(drip(running, 600))
        yield "health_among_dripping_median_ms", 1e3 * statistics.median(latencies)
        yield "health_among_dripping_p99_ms", 1e3 * p99(latencies)


def bad_fields() -> Figures:
    """Scorecard D-1: bodies that are refused."""
    values = [None, -1, 1e300, "x", [], {}, [[1]], True]
    fields = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream_options")
    with server() as running, running.client() as http:
        bodies = [{"prompt": "hello", "max_tokens": 1, field: value} for field in fields for value in values]
        yield "bad_field_p99_ms", 1e3 * p99([seconds(lambda b=b: http.post("/v1/completions", json=b)) for b in bodies])


class Stall:
    """The longest that the server's loop did not turn, meanwhile."""

    PERIOD_S = 0.002

    def __init__(self, running: Running) -> None:
        self._loop, self._on = running.loop, True
        self.worst_s, self._last = 0.0, time.perf_counter()
        running.loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.worst_s, self._last = max(self.worst_s, now - self._last - self.PERIOD_S), now
        if self._on:
            self._loop.call_later(self.PERIOD_S, self._tick)

    def end_ms(self) -> float:
        self._on = False
        return 1e3 * self.worst_s


def stalls() -> Figures:
    """Scorecard E-1 and D-5: what one body may cost everybody else."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with server() as running, running.client() as http:
        http.get("/health")
        stall = Stall(running)
        with running.connect() as sock:
            sock.sendall(head + b"content-length: %d\r\n\r\n" % (64 * MIB))
            sender = threading.Thread(target=send_some, args=(sock, b"x" * (64 * MIB)))
            sender.start()
            assert sock.recv(4096).startswith(b"HTTP/1.1 413")
        sender.join()
        yield "loop_stall_by_large_body_ms", stall.end_ms()
        stall = Stall(running)
        for text in ("a" * 10**6, "^" * 10**6):
            assert http.post("/v1/completions", json={"prompt": text}).status_code == 400
        yield "loop_stall_by_long_text_ms", stall.end_ms()


def send_some(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return  # refused, as it should be


def aborts() -> Figures:
    """Scorecard H-2: from a client's leaving to the engine's knowing it."""
    rng, took = random.Random(5), []
    with server(lambda: FakeEngine(manual=True)) as running:
        for _ in range(100):
            sock = running.connect()
            sock.sendall(request(stream=rng.random() < 0.5, n=rng.randint(1, 3)))
            running.until(lambda: bool(running.engine.running))
            took.append(seconds(lambda s=sock: (s.close(), running.until(lambda: not running.engine.running))))
    yield "abort_max_ms", 1e3 * max(took)


# -- the whole tree -------------------------------------------------------------------------------------------------


def processes() -> Figures:
    """Scorecard F-1, F-4 and I-1, with a model that is small enough to start at once."""
    with tempfile.TemporaryDirectory() as scratch:
        model = make_chat_model(Path(scratch) / "model", context_length=16384).path
        with serving(Path(scratch) / "killed", model, *SMALL) as tree:
            yield from after_a_death(tree)
        with serving(Path(scratch) / "idle", model, *SMALL) as tree:
            tree.server.send_signal(signal.SIGTERM)
            yield "idle_end_after_sigterm_s", seconds(lambda: tree.server.wait(HANGS_S))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            command = [*FOREBAY, "serve", str(model), *SMALL, "--port", str(taken.getsockname()[1])]
            yield (
                "start_on_a_taken_port_fails_s",
                seconds(partial(subprocess.run, command, capture_output=True, cwd=ROOT)),
            )


def after_a_death(tree: Tree) -> Figures:
    pids = [tree.server.pid, tree.engine_pid]
    begun, told = threading.Event(), []

    def stream() -> None:
        body = {"prompt": [5, 6], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with tree.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_bytes():
                begun.set()
        told.append(time.perf_counter())

    client = threading.Thread(target=stream)
    client.start()
    begun.wait()
    killed_at = time.perf_counter()
    os.kill(tree.engine_pid, signal.SIGKILL)
    wait_until(lambda: not tree.healthy())
    yield "health_tells_of_a_dead_engine_s", time.perf_counter() - killed_at
    client.join()
    yield "clients_told_of_a_dead_engine_s", told[0] - killed_at
    wait_until(lambda: tree.server.poll() is not None and not any(map(alive, pids)))
    yield "tree_gone_after_a_death_s", time.perf_counter() - killed_at


MEASUREMENTS: Final = (help_pages, tokenizer, crowd, dripping, bad_fields, stalls, aborts, processes)


def main() -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__).parse_args()
    limits: dict[str, float] = tomllib.loads(LIMITS.read_text())
    over = []
    for name, value in (figure for measure in MEASUREMENTS for figure in measure()):
        limit = limits.pop(name)
        over += [name] if value > limit else []
        print(f"{name:<40} {value:10.3f}   limit {limit:<6g} {'OVER' if value > limit else ''}", flush=True)
    assert not limits, f"limits of nothing that is measured: {sorted(limits)}"
    print(f"{len(over)} over their limits: {', '.join(over)}" if over else "all within their limits")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())

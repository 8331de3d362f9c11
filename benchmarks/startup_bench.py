"""Seconds from spawning `forebay serve` to its readiness and to the first token of a request over HTTP.

    python benchmarks/startup_bench.py [--repeats 5]

The embedded model, kernels compiled and files in the page cache: one start before the measured ones sees to both.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

_BIN = Path(sys.executable).parent
_POLL_S = 0.01
_LIMIT_S = 120.0


def start() -> tuple[float, float]:
    """One start: seconds until /ready says yes, and until the first event of a stream arrives."""
    port = free_port()
    started = time.perf_counter()
    process = subprocess.Popen(
        [_BIN / "forebay", "serve", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - started > _LIMIT_S:
                raise SystemExit("the server did not come up; start it by hand to see why: forebay serve")
            time.sleep(_POLL_S)
        ready = time.perf_counter() - started
        first_token(port)
        return ready, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def first_token(port: int) -> None:
    """Return when the first event of a stream has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 1, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    if response.status != 200 or not line.startswith(b"data: "):
        raise SystemExit(f"the first request failed: {response.status} {line.decode(errors='replace')}")
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = max(1, parser.parse_args().repeats)
    start()
    runs = [start() for _ in range(repeats)]
    table = Table("from spawning to", "median, s", "fastest, s", "slowest, s", title=f"{repeats} starts")
    for name, values in zip(("ready", "first token over HTTP"), zip(*runs, strict=True), strict=True):
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    Console().print(table)


if __name__ == "__main__":
    main()

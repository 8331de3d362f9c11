"""Gigabytes per second of weights from files in the page cache to a GPU, as a start loads them.

    python -m benchmarks.gpu_loading                       # four layers like Llama-3.1-8B's: 2.3 GB of files
    python -m benchmarks.gpu_loading --tiny --device cpu   # that this program works

The files are written just before, into the folder for temporary files, and are removed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu_models import MODELS, TINY
from forebay.backends import make_ops
from forebay.config.resolve import resolve
from forebay.engine.lifecycle.packed_cache import PackedCache
from forebay.engine.lifecycle.weights import EngineWeights
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.formats.safetensors_writer import Entry, write_safetensors
from forebay.models import needs_of
from forebay.pools.regions import Regions, Tag

GOAL_GB_S: Final = 3.0
SHAPE: Final[dict[str, Any]] = {**MODELS["llama"], "num_hidden_layers": 4, "vocab_size": 32_000}
_BLOCK: Final = 1 << 24  # bytes that repeat in a file


def write_model(folder: Path, *, tiny: bool) -> None:
    """Write a llama in bfloat16, of random weights that repeat."""
    values = SHAPE | (TINY["llama"] if tiny else {})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **values}))
    params = needs_of(config_from_folder(folder)).params
    entries = {name: Entry("BF16", tuple(shape)) for param in params for name, shape in param.parts()}
    draw = torch.randn(_BLOCK // 2, generator=torch.Generator().manual_seed(0)) / 64
    block = memoryview(draw.bfloat16().view(torch.uint8).numpy()).cast("B")

    def pieces() -> Iterator[memoryview]:
        for entry in entries.values():
            for first in range(0, entry.num_bytes, _BLOCK):
                yield block[: entry.num_bytes - first]

    with (folder / "model.safetensors").open("xb") as file:
        write_safetensors(file, entries, pieces())


def load(folder: Path, device: str) -> tuple[int, float]:
    """Return the bytes of the packed weights, and the seconds from opening the files to the last byte."""
    settings = {"model": str(folder), "device": device, "dtype": "bfloat16", "context_length": 1024}
    config = resolve({**settings, "quantization": "none"}).engine
    ops, regions = make_ops(config.kernels, config.num_threads), Regions(device)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(config.model_path)
    weights = EngineWeights(config, checkpoint, ops, PackedCache(config, ops, regions), num_positions=1024)
    with torch.inference_mode(), regions.inside(Tag.WEIGHTS):
        weights.load(checkpoint, lambda: _unseen, lambda: _unseen)
    if device == "cuda":
        torch.cuda.synchronize()
    return weights.num_bytes, time.perf_counter() - begin


def _unseen(done: int, total: int) -> None:
    """Progress that nobody watches."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    args = parser.parse_args(arguments)
    print("| weights, GB | first load, s | second load, s | GB/s | goal, GB/s |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), tiny=args.tiny)
        (num_bytes, first_s), (_, second_s) = (load(Path(name), args.device) for _ in range(2))
    speed = num_bytes / min(first_s, second_s) / 1e9
    print(f"| {num_bytes / 1e9:,.3f} | {first_s:.2f} | {second_s:.2f} | {speed:.2f} | {GOAL_GB_S:.2f} |")


if __name__ == "__main__":
    main()

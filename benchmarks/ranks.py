"""Decode steps of a model that is split among ranks, beside those of one process with as many threads.

    python -m benchmarks.ranks                            # two ranks, 1, 4 and 16 rows; two minutes
    python -m benchmarks.ranks --size 4 --steps 100

The model is the embedded one in the codes of its file: of its 3 KV heads, one of two ranks has two. Each rank is a
process with one thread; all run the same steps without a scheduler. `exchange` is the time of a step's exchanges alone,
of the same shapes in the same order. Tokens of the ranks and of one process must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from forebay import models
from forebay.backends import make_ops
from forebay.base.units import human_bytes
from forebay.config.engine_config import CacheTypes
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.formats.quantization import Quantization
from forebay.formats.store import find_model
from forebay.memory.budget import PoolSizes
from forebay.ops.exchange import ALONE, Exchange, share_of, units_of
from forebay.ops.native.exchange import SharedExchange, mapped, shared_bytes
from forebay.ops.native.ops import NativeOps
from forebay.runtime import build_runner
from tests.runtime.plans import Planner

PROMPT, PAGE_SIZE, PAGES_PER_ROW = 64, 16, 64


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians in seconds of a step and of its exchanges, the last tokens, and the bytes of the weights."""

    step_s: float
    exchange_s: float
    tokens: list[int]
    weight_bytes: int


def native(num_threads: int) -> NativeOps:
    """Return kernels of this process alone."""
    ops = make_ops("native", num_threads)
    assert isinstance(ops, NativeOps), "there are no native kernels for this CPU"
    return ops


def measured(path: Path, ops: NativeOps, exchange: Exchange, num_rows: int, num_steps: int) -> Figures:
    """Run the prompts of all rows, then decode steps."""
    checkpoint, context = open_checkpoint(path), PAGE_SIZE * PAGES_PER_ROW
    options = {"dtype": torch.float32, "quantization": Quantization.FILE, "context_length": context}
    model = models.load(checkpoint, ops=ops, share=share_of(exchange), **options)
    runner = build_runner(
        model,
        ops=ops,
        sizes=PoolSizes(
            num_slots={"kv": num_rows * PAGES_PER_ROW},
            page_size=PAGE_SIZE,
            max_running_requests=num_rows,
            context_length=context,
        ),
        types=CacheTypes(),
        max_num_tokens=max(PROMPT, num_rows),
        vocab_size=checkpoint.config.vocab_size,
        device="cpu",
        exchange=exchange,
    )
    plans = Planner(runner, page_size=PAGE_SIZE, num_rows=num_rows, pages_per_row=PAGES_PER_ROW)
    rows = list(range(1, num_rows + 1))
    for row in rows:
        plans.admit(row, [100 + 7 * row + place for place in range(PROMPT)])
        plans.step([(row, PROMPT)])
    seconds, tokens = [], list[int]()
    for _ in range(num_steps):
        begin = time.perf_counter()
        tokens = plans.step(decodes=rows).token_ids
        seconds.append(time.perf_counter() - begin)
    own = exchanging(exchange, checkpoint.config, num_rows, num_steps)
    return Figures(median(seconds), own, tokens, model.weight_bytes)


def exchanging(exchange: Exchange, model: ModelConfig, num_rows: int, num_steps: int) -> float:
    """Return the median time of the exchanges of a step; the shapes are those of the model."""
    size, heads = exchange.size, model.num_kv_heads
    own = len(units_of(exchange.rank, size, heads)) * model.num_heads // heads * model.head_dim
    others = [count // size for count in (model.hidden_size, model.intermediate_size, model.hidden_size)]
    read, *parts = (torch.zeros(num_rows, width) for width in (own, *others))
    vocabulary = -(-model.vocab_size // size)
    ids, table = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, model.hidden_size)
    logits, seconds = torch.zeros(num_rows, vocabulary), []
    for _ in range(num_steps):
        begin = time.perf_counter()
        exchange.rows(table, exchange.places(ids, vocabulary), vocabulary)
        for _ in range(model.num_layers):
            exchange.gather(read, heads)
            for part in parts:
                exchange.gather(part)
        exchange.collect(logits, model.vocab_size)
        for _ in range(2):
            exchange.spread(ids)
        seconds.append(time.perf_counter() - begin)
    exchange.check()
    return median(seconds)


def process(path: Path, rank: int, size: int, threads: int, rows: int, steps: int, descriptor: int) -> Figures:
    """Measure in this process: the rank, or one process without ranks (size 1)."""
    ops, exchange = native(threads), ALONE
    if size > 1:
        memory = mapped(descriptor, shared_bytes(ops.kernels, size))
        exchange = SharedExchange(ops.kernels, memory, rank, size)
    return measured(path, ops, exchange, rows, steps)


def run(path: Path, size: int, threads: int, rows: int, steps: int) -> list[Figures]:
    """Start a process for each rank, and return the figures of all."""
    descriptor = os.memfd_create("exchange")
    os.ftruncate(descriptor, shared_bytes(native(1).kernels, size))
    try:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", "--child", str(path), *map(str, numbers)],
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
            )
            for numbers in ((rank, size, threads, rows, steps, descriptor) for rank in range(size))
        ]
        return [Figures(**json.loads(child.communicate()[0])) for child in started]
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each figure")
    parser.add_argument("--child", nargs=7, help=argparse.SUPPRESS)
    own = parser.parse_args(arguments)
    if own.child is not None:
        path, *numbers = own.child
        print(json.dumps(asdict(process(Path(path), *map(int, numbers)))))
        return
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, {own.steps} steps")
    print(f"| rows | step of {own.size} ranks | of it exchange | steps/s | one process, {own.size} threads | weights |")
    print("|---|---|---|---|---|---|")
    path = find_model(None)
    for rows in own.rows:
        ranks, (alone,) = run(path, own.size, 1, rows, own.steps), run(path, 1, own.size, rows, own.steps)
        first = ranks[0]
        assert first.tokens == alone.tokens, "ranks gave other tokens than one process"
        weights = " + ".join(human_bytes(each.weight_bytes) for each in ranks)
        print(
            f"| {rows} | {1e3 * first.step_s:.2f} ms | {1e6 * first.exchange_s:.0f} us "
            f"({first.exchange_s / first.step_s:.0%}) | {1 / first.step_s:.0f} | {1 / alone.step_s:.0f} "
            f"({alone.step_s / first.step_s:.2f}x) | {weights} of {human_bytes(alone.weight_bytes)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Decode steps of a model that is split among ranks, beside those of one process with as many threads.

    python -m benchmarks.ranks                            # two ranks, 1, 4 and 16 rows; two minutes
    python -m benchmarks.ranks --size 4 --steps 100
    python -m benchmarks.ranks --device cuda --model PATH # a GPU for each rank (NCCL), or one for all

The model is the embedded one in the codes of its file: of its 3 KV heads, one of two ranks has two. Each rank is a
process with one thread; all run the same steps without a scheduler. `exchange` is the time of a step's exchanges alone,
of the same shapes in the same order. Tokens of the ranks and of one process must be equal. On GPUs this was never run.
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

import msgspec
import torch

from forebay import models
from forebay.backends import make_ops
from forebay.base.units import human_bytes
from forebay.config.engine_config import CacheTypes, EngineConfig
from forebay.config.resolve import resolve
from forebay.engine.lifecycle.exchanges import make_exchange, make_exchange_file
from forebay.engine.lifecycle.weights import DTYPES
from forebay.engine.ranks.processes import own_variables
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.formats.quantization import Quantization
from forebay.formats.store import find_model
from forebay.memory.budget import PoolSizes
from forebay.ops import Ops
from forebay.ops.exchange import ALONE, Exchange, share_of, units_of
from forebay.runtime import build_runner
from forebay.runtime.graphs.backends import Eager
from tests.runtime.plans import Planner

PROMPT, PAGE_SIZE, PAGES_PER_ROW = 64, 16, 64


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians in seconds of a step and of its exchanges, the last tokens, and the bytes of the weights."""

    step_s: float
    exchange_s: float
    tokens: list[int]
    weight_bytes: int


def configured(path: Path, size: int, device: str, exchange: str) -> EngineConfig:
    """Return the configuration of an engine with these ranks, of which the exchange is made."""
    asked = {"model": str(path), "tp_size": size, "device": device, "tp_exchange": exchange}
    return resolve(asked | ({"kernels": "native"} if device == "cpu" else {})).engine


def measured(config: EngineConfig, ops: Ops, exchange: Exchange, num_rows: int, num_steps: int) -> Figures:
    """Run the prompts of all rows, then decode steps."""
    checkpoint, context = open_checkpoint(config.model_path), PAGE_SIZE * PAGES_PER_ROW
    name = "float32" if config.device == "cpu" else "bfloat16"
    quantization = Quantization.FILE if checkpoint.weight_shapes().has_codes else Quantization.NONE
    options = {"dtype": DTYPES[name], "quantization": quantization, "context_length": context}
    options["device"] = config.device
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
        types=CacheTypes(dtype=name, kv_cache_dtype=name, chunked_scans=config.types.chunked_scans),
        max_num_tokens=max(PROMPT, num_rows),
        vocab_size=checkpoint.config.vocab_size,
        device=config.device,
        graphs=None if exchange.in_graphs else Eager(),
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
    with torch.device(config.device):
        own = exchanging(exchange, checkpoint.config, DTYPES[name], num_rows, num_steps)
    return Figures(median(seconds), own, tokens, model.weight_bytes)


def exchanging(exchange: Exchange, model: ModelConfig, dtype: torch.dtype, num_rows: int, num_steps: int) -> float:
    """Return the median time of the exchanges of a step; the shapes are those of the model."""
    size, heads = exchange.size, model.num_kv_heads
    own = len(units_of(exchange.rank, size, heads)) * model.num_heads // heads * model.head_dim
    others = [count // size for count in (model.hidden_size, model.intermediate_size, model.hidden_size)]
    read, *parts = (torch.zeros(num_rows, width, dtype=dtype) for width in (own, *others))
    vocabulary = -(-model.vocab_size // size)
    ids, table = torch.zeros(num_rows, dtype=torch.int64), torch.zeros(num_rows, model.hidden_size, dtype=dtype)
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
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    exchange.check()
    return median(seconds)


@dataclass(frozen=True, slots=True)
class Run:
    """What each process of a row of the table gets: the ranks' configuration, threads of one, rows and steps."""

    config: EngineConfig
    threads: int
    rows: int
    steps: int

    def process(self, rank: int, file: int) -> Figures:
        """Measure in this process: the rank, or one process without ranks, by the same kernels."""
        config = self.config
        ops = make_ops(config.kernels, self.threads, of_ranks=True)
        exchange = make_exchange(config, ops, rank, file, ()) if config.ranks.size > 1 else ALONE
        return measured(config, ops, exchange, self.rows, self.steps)

    def figures(self) -> list[Figures]:
        """Start a process for each rank, and return the figures of all."""
        ranks = self.config.ranks
        file = make_exchange_file(self.config, make_ops(self.config.kernels, 1))
        text = msgspec.json.encode(self).decode()
        try:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.ranks", "--child", text, str(rank), str(file)],
                    stdout=subprocess.PIPE,
                    pass_fds=[file],
                    env=os.environ | own_variables(ranks, rank),
                )
                for rank in range(ranks.size)
            ]
            return [Figures(**json.loads(child.communicate()[0])) for child in started]
        finally:
            os.close(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each figure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks compute")
    parser.add_argument("--model", help="as of forebay serve; the embedded one by default")
    parser.add_argument("--exchange", default="auto", help="as --tp-exchange of forebay serve")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    own = parser.parse_args(arguments)
    if own.child is not None:
        text, *numbers = own.child
        print(json.dumps(asdict(msgspec.json.decode(text, type=Run).process(*map(int, numbers)))))
        return
    path = find_model(own.model)
    split, whole = (configured(path, size, own.device, own.exchange) for size in (own.size, 1))
    where = f"{own.device}, exchange by {split.ranks.exchange}"
    print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, {own.steps} steps, {where}")
    print(f"| rows | step of {own.size} ranks | of it exchange | steps/s | one process, {own.size} threads | weights |")
    print("|---|---|---|---|---|---|")
    for rows in own.rows:
        ranks = Run(split, 1, rows, own.steps).figures()
        (alone,), first = Run(whole, own.size, rows, own.steps).figures(), ranks[0]
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

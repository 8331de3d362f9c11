"""The table of docs/benchmarks.md, "On a GPU": models of published shapes, decodes and prompts beside floors and goals.

    python -m benchmarks.gpu_table llama int4                     # two cases; 60 GB of memory
    python -m benchmarks.gpu_table llama --tiny --device cpu      # that this program works

Weights are random, made on the device. Steps go through the engine core, with one step in flight. A floor is the bytes
of a step over the bandwidth of a copy, or the operations of a prompt over the rate of a large product, both measured
just before. `busy` is the time of the GPU's kernels by its own clock, of the step. A row that takes longer than its
limit ends the program, so each case has a process of its own (benchmarks/gpu.py).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from benchmarks.gpu_decode import Bench, Codes, Figures, Watched, bandwidth, run_steps
from benchmarks.gpu_kernels import rate
from benchmarks.gpu_models import MODELS, TINY
from forebay.engine.loop.core import EngineCore
from forebay.formats.quantized import FP8, FP8_GROUP, MXFP4, CodeFormat

STEPS: Final = 24
TRANSFORMERS: Final = "transformers"
SQUARE: Final = {"cuda": 8192, "cpu": 64}  # of the product whose rate is the floor of prompts
HOST_GOALS_MS: Final = {64: 0.3, 256: 0.6}
HOST_GOAL_OF_PROMPTS_MS: Final = 3.0
BUSY_GOAL: Final = 0.97  # of a decode, in which kernels run
SAME_SHARE: Final = 0.86  # of the floor: that of the goal of 64 decodes in bfloat16
SET_UP_S: Final = 40.0  # for a model, its weights and its kernels


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    `what`: "decode" of `batch` requests behind `tokens` tokens, "prompt" of so many, or the "arrival" of such a prompt
    while `batch` requests decode behind 1,024 tokens. `before_ms` was measured on 28 November 2026.
    """

    what: str
    batch: int
    tokens: int
    before_ms: float | None
    goal_ms: float | None
    limit_s: float = 15.0
    goal_share: float | None = None  # of the floor, if there is no time as a goal

    @property
    def host_goal_ms(self) -> float | None:
        """The goal for the host's time, of a step with a prompt or of decodes of 64 and 256 requests."""
        return HOST_GOALS_MS.get(self.batch) if self.what == "decode" else HOST_GOAL_OF_PROMPTS_MS

    @property
    def name(self) -> str:
        """The name in the table."""
        match self.what:
            case "decode":
                return f"decode, {self.batch} x {self.tokens:,}"
            case "prompt":
                return f"prompt of {self.tokens:,}"
            case _:
                return f"{self.batch} decode, a prompt of {self.tokens:,} arrives"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, the form of its weights and KV, and its rows, the most important first."""

    like: str
    rows: tuple[Row, ...]
    codes: Codes | None = None
    fp8_inputs: bool = False
    kv_dtype: str | None = None


def _three(*figures: tuple[float | None, float | None]) -> tuple[Row, ...]:
    """Rows of decodes of 1 and 64 requests and of a prompt of 2,048, by what they took before and their goals."""
    places = (("decode", 1, 1024), ("decode", 64, 1024), ("prompt", 1, 2048))
    return tuple(Row(*place, *pair) for place, pair in zip(places, figures, strict=False))


CASES: Final = {
    "llama": Case(
        like="llama",
        rows=(
            Row("decode", 64, 1024, 9.92, 9.2),
            Row("decode", 1, 1024, 6.58, 5.9),
            Row("prompt", 1, 2048, 50.7, 44.0),
            Row("arrival", 64, 2048, 76.0, 50.0, 25.0),
            Row("decode", 256, 1024, 22.3, 20.0, 25.0),
            Row("prompt", 1, 512, 15.8, 11.0),
            Row("prompt", 1, 8192, 249.0, 205.0),
            Row("prompt", 1, 32_768, 1860.0, 1200.0, 25.0),
        ),
    ),
    "int4": Case(
        like="llama",
        codes=Codes(CodeFormat(bits=4, minimums=False, group=128)),
        rows=_three((14.6, 2.8), (61.3, 7.0), (646.0, 60.0)),
    ),
    "falcon_h1": Case(like="falcon_h1", rows=_three((7.96, 5.8), (29.9, 16.5), (131.0, 55.0))),
    "gpt_oss": Case(
        like="gpt_oss", codes=Codes(MXFP4, ".experts."), rows=_three((8.4, 1.9), (40.7, 7.0), (966.0, 35.0))
    ),
    "q4": Case(like="llama", codes=Codes(CodeFormat(bits=4, minimums=True)), rows=_three((13.6, 3.0), (46.5, 7.5))),
    "qwen3_5": Case(like="qwen3_5_text", rows=_three((6.8, 5.9), (12.0, 9.5), (136.0, 50.0))),
    "qwen3_moe": Case(like="qwen3_moe", rows=_three((4.31, 2.0), (18.0, 13.5), (52.6, 16.0))),
    "fp8": Case(
        like="llama",
        codes=Codes(replace(FP8, group=FP8_GROUP)),
        fp8_inputs=True,
        rows=(Row("decode", 64, 1024, None, 6.5), Row("prompt", 1, 2048, None, 30.0)),
    ),
    TRANSFORMERS: Case(
        like=TRANSFORMERS, rows=(Row("decode", 64, 1024, None, None), Row("decode", 1, 1024, None, None))
    ),
    "kv_int8": Case(like="llama", kv_dtype="int8", rows=(Row("decode", 64, 1024, None, None, goal_share=SAME_SHARE),)),
    "kv_fp8": Case(like="llama", kv_dtype="fp8", rows=(Row("decode", 64, 1024, None, None, goal_share=SAME_SHARE),)),
}


def decode(bench: Bench, row: Row) -> tuple[Figures, float | None]:
    """Return the faster of two runs of steps, and the milliseconds of the kernels of one."""
    room = 4 * STEPS + 16
    core, watched = bench.engine_of(row.batch, row.tokens + room, prompt=0)
    bench.fill(core, row.batch, row.tokens, room)
    runs = [run_steps(core, watched, STEPS) for _ in range(2)]
    return min(runs, key=lambda run: run.step_ms), kernels_ms(bench, lambda: run_steps(core, watched, STEPS // 3))


def kernels_ms(bench: Bench, run: Callable[[], object]) -> float | None:
    """Return the milliseconds of the GPU's kernels in a step, or None without a GPU."""
    if bench.device != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3 / (STEPS // 3)


def prompt(bench: Bench, row: Row) -> Figures:
    """Return the fastest of three prompts, from its arrival to its first token."""
    core, watched = bench.engine_of(1, row.tokens + 8, prompt=row.tokens)
    return min((_arrival(bench, core, watched, 10 + i, row.tokens) for i in range(3)), key=lambda one: one.step_ms)


def arrival(bench: Bench, row: Row) -> Figures:
    """Return the second of two prompts that arrive while others decode: kernels are compiled by then."""
    context = min(1024, row.tokens)
    core, watched = bench.engine_of(row.batch + 1, row.tokens + 200)
    bench.fill(core, row.batch, context, 150)
    return [_arrival(bench, core, watched, 1000 + i, row.tokens) for i in range(2)][-1]


def _arrival(bench: Bench, core: EngineCore, watched: Watched, number: int, length: int) -> Figures:
    waited, start = watched.waited_s, time.perf_counter()
    bench.add(core, number, length, 1)
    while not any(update.finish for update in core.step()):
        pass
    seconds = time.perf_counter() - start
    return Figures(1e3 * seconds, 1e3 * (seconds - watched.waited_s + waited))


def operations_of_prompt(bench: Bench, length: int) -> float:
    """Return the operations of a prompt: products of each token with the weights that it uses, of one token with the
    head, and attention over half of all pairs in layers without a window."""
    config, experts = bench.config, bench.config.experts
    tables = bench.spec.embedding.num_elements * (1 if bench.spec.tied else 2)
    weights = sum(param.num_elements for param in bench.params) - tables - bench.num_expert_weights
    if experts is not None:
        weights += bench.num_expert_weights * experts.per_token / experts.num_experts
    layers = sum(not kind.startswith(("linear", "sliding")) for kind in config.layer_types)
    return 2.0 * weights * length + 2.0 * length**2 * config.num_heads * config.head_dim * layers


def measured(bench: Bench, row: Row, speed: float, operations: float) -> str:
    """Return the cells of a row behind its name."""
    floor_ms, busy = None, ""
    if row.what == "decode":
        figures, kernels = decode(bench, row)
        floor_ms = 1e3 * bench.bytes_of_step(row.batch, row.tokens + STEPS) / speed
        busy = "" if kernels is None else f"{kernels / figures.step_ms:.0%}"
    elif row.what == "prompt":
        figures = prompt(bench, row)
        floor_ms = 1e3 * operations_of_prompt(bench, row.tokens) / operations
    else:
        figures = arrival(bench, row)
    return cells(row, figures, floor_ms, busy)


def cells(row: Row, figures: Figures, floor_ms: float | None = None, busy: str = "") -> str:
    """Return the cells of figures, with the goals and the time before."""
    floor, share = ("", "") if floor_ms is None else (f"{floor_ms:,.3f}", f"{floor_ms / figures.step_ms:.0%}")
    goal_ms = row.goal_ms
    if row.goal_share is not None and floor_ms is not None:
        goal_ms = floor_ms / row.goal_share
    before, goal, host_goal = (_cell(value) for value in (row.before_ms, goal_ms, row.host_goal_ms))
    step = f"{floor} | {figures.step_ms:,.3f} | {share} | {before} | {goal}"
    busy_goal = f"{BUSY_GOAL:.0%}" if row.what == "decode" else ""
    return f"{step} | {figures.host_ms:,.3f} | {host_goal} | {busy} | {busy_goal}"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


class Transformers:
    """The `generate` of transformers on the shape of llama. All time of a step counts as the host's."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        values = MODELS["llama"] | (TINY["llama"] if args.tiny else {})
        with torch.device(args.device):
            self._model = LlamaForCausalLM(LlamaConfig(**values, dtype=torch.bfloat16)).bfloat16().eval()

    def decode(self, row: Row) -> Figures:
        """Return what more tokens add to the time of one."""
        one, more = (self._seconds(row, count) for count in (1, 1 + STEPS))
        step_ms = 1e3 * (more - one) / STEPS
        return Figures(step_ms, step_ms)

    @torch.inference_mode()
    def _seconds(self, row: Row, count: int) -> float:
        prompts = torch.ones(row.batch, row.tokens, dtype=torch.int64, device=self._model.device)
        begin = time.perf_counter()
        self._model.generate(
            prompts, attention_mask=prompts, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0
        )
        if prompts.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def tiny(row: Row) -> Row:
    """Return a row of the same kind in milliseconds."""
    return replace(row, batch=min(row.batch, 3), tokens=min(48, row.tokens // 40), limit_s=60.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=tuple(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and batches")
    args = parser.parse_args(arguments)
    args.batch, args.context, args.steps, args.repeats = [1], 64, 4, 1
    print("| case | row | floor, ms | ms | of floor | before, ms | goal, ms | host, ms | goal | busy | goal |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    speed, operations = bandwidth(args.device), rate(SQUARE[args.device], args.device)
    for name in args.cases:
        faulthandler.dump_traceback_later(SET_UP_S, exit=True)
        for row, shown in lines(name, args, speed, operations):
            faulthandler.dump_traceback_later(row.limit_s, exit=True)
            print(f"| {name} | {row.name} | {shown()} |", flush=True)
            gc.collect()
            if args.device == "cuda":  # what a runner's graphs had is of no use to the next one's
                torch.cuda.empty_cache()
        faulthandler.cancel_dump_traceback_later()


def lines(
    name: str, args: argparse.Namespace, speed: float, operations: float
) -> Iterator[tuple[Row, Callable[[], str]]]:
    """Yield the rows of a case, and for each the call that measures it."""
    case = CASES[name]
    if case.like == TRANSFORMERS:
        theirs = Transformers(args)
        for row in chosen(case, args):
            yield row, lambda row=row: cells(row, theirs.decode(row))
        return
    codes, fp8_inputs = case.codes, case.fp8_inputs and args.device == "cuda"
    bench = Bench(case.like, args, codes, fp8_inputs=fp8_inputs, kv_dtype=case.kv_dtype)
    for row in chosen(case, args):
        yield row, lambda row=row: measured(bench, row, speed, operations)


def chosen(case: Case, args: argparse.Namespace) -> list[Row]:
    """Return the rows of a case, or small ones of the same kinds."""
    return [tiny(row) if args.tiny else row for row in case.rows]


if __name__ == "__main__":
    main()

"""Gaps between tokens while prompts arrive, with and without the limit of mixed steps by time (`--max-step-ms`).

    python -m benchmarks.mixed_steps [--streams 16] [--input-len 128] [--output-len 128] [--pairs 5]

One engine in this process, without HTTP and guesses, serves `--streams` requests at once; each that ends is followed
by another, so that prompts come while others decode. Runs without and with the limit take turns. A row has the median
and the 99th percentile of the gaps between two tokens of a request, and tokens a second, prompts included. The ratios
are medians of pairs: a machine that others use as well changes from one run to the next.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import NamedTuple

from forebay.config.resolve import resolve
from forebay.engine.frames import AddRequest
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.mixed import MixedChunks
from forebay.requests.sampling_params import SamplingParams

TOKENS = range(1000, 40_000)  # of prompts


class Run(NamedTuple):
    median_ms: float
    p99_ms: float
    tokens_s: float

    @property
    def steps(self) -> float:
        """The 99th percentile in median gaps."""
        return self.p99_ms / self.median_ms


class Load:
    """Requests that follow one another in `streams`. Lengths vary by a quarter, so that they do not end together."""

    def __init__(self, core: EngineCore, args: argparse.Namespace, seed: int) -> None:
        self._core, self._args, self._random = core, args, random.Random(seed)
        self._last: dict[int, float] = {}  # when a request had its last token
        self._ids = iter(range(seed << 20, (seed + 1) << 20))
        self._left = args.requests
        self._gaps: list[float] = []
        self._num_tokens = 0

    def _around(self, number: int) -> int:
        return self._random.randint(3 * number // 4, 5 * number // 4)

    def _ask(self) -> None:
        if self._left:
            self._left -= 1
            prompt = self._random.choices(TOKENS, k=self._around(self._args.input_len))
            params = SamplingParams(max_tokens=self._around(self._args.output_len), ignore_eos=True, temperature=0)
            self._num_tokens += len(prompt) + params.max_tokens
            self._core.add(AddRequest(request_id=next(self._ids), prompt_token_ids=prompt, params=params))

    def run(self) -> Run:
        begin = time.monotonic()
        for _ in range(self._args.streams):
            self._ask()
        while not self._core.idle:
            updates, now = self._core.step(), time.monotonic()
            for update in updates:
                if update.token_ids and (before := self._last.get(update.request_id)):
                    self._gaps.append(1e3 * (now - before))
                self._last[update.request_id] = now
                if update.finish:
                    self._ask()
        cuts = quantiles(self._gaps, n=100)
        return Run(median(self._gaps), cuts[98], self._num_tokens / (time.monotonic() - begin))


def pairs(core: EngineCore, args: argparse.Namespace, limited: MixedChunks) -> Iterator[tuple[Run, Run]]:
    """Runs without and with the limit, of the same requests; the first pair warms up and is not counted."""
    for seed in range(args.pairs + 1):
        runs = []
        for mixed in (None, limited) if seed % 2 else (limited, None):
            core._mixed = mixed
            core.scheduler.flush_cache()
            while not core.idle:
                core.step()
            runs.append(Load(core, args, 2 * seed + (mixed is None)).run())
        if seed:
            yield (runs[0], runs[1]) if seed % 2 else (runs[1], runs[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--activation-bits", type=int)
    args = parser.parse_args()
    flags = {"model": args.model, "activation_bits": args.activation_bits, "speculative_algorithm": "off"}
    config = resolve({**flags, "max_running_requests": args.streams, "log_level": "error"})
    core, _ = build_engine(config.engine)
    mixed = MixedChunks(None, config.engine.memory.page_size)
    print("| pair | median gap, ms | p99, ms | p99 in medians | tokens/s |", "|---|---|---|---|---|", sep="\n")
    found = []
    for number, (before, after) in enumerate(pairs(core, args, mixed)):
        found.append((before, after))
        for name, run in (("without", before), ("with", after)):
            print(
                f"| {number} {name} | {run.median_ms:.1f} | {run.p99_ms:.1f} | {run.steps:.2f} | {run.tokens_s:.0f} |",
                flush=True,
            )
    print(
        f"p99 in medians: {median(b.steps for b, _ in found):.2f} without, {median(a.steps for _, a in found):.2f} with"
    )
    print(f"p99: {median(a.p99_ms / b.p99_ms for b, a in found):.2f} times")
    print(f"tokens/s: {median(a.tokens_s / b.tokens_s for b, a in found):.3f} times")


if __name__ == "__main__":
    main()

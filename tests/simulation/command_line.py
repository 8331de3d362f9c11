"""The command line of simulations: one seed again, or many of them by several processes."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import partial
from typing import Any


def _try_chunk(run: Callable[[int], Any], nothing: Any, seeds: range) -> tuple[Any, list[str]]:
    total, failures = nothing, []
    for seed in seeds:
        try:
            total += run(seed)
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return total, failures


def command_line(
    name: str, about: str, run: Callable[[int], Any], nothing: Any, argv: Sequence[str] | None = None
) -> int:
    """Replay a seed, or run a range of them; `nothing` is what the outcomes are added to."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("--seed", type=int, help="replay one seed and show its traceback")
    parser.add_argument("--seeds", default="0:10000", help="a range first:last, last excluded")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    if args.seed is not None:
        return _replay(run, args.seed)
    first, last = map(int, args.seeds.split(":"))
    chunks = [range(at, min(at + 50, last)) for at in range(first, last, 50)]
    started, total, failures = time.monotonic(), nothing, []
    with ProcessPoolExecutor(args.jobs) as pool:
        for done, (outcome, failed) in enumerate(pool.map(partial(_try_chunk, run, nothing), chunks), 1):
            total += outcome
            failures += failed
            _progress(done, len(chunks), len(failures))
    _summary(name, total, failures, time.monotonic() - started)
    return 1 if failures else 0


def _replay(run: Callable[[int], Any], seed: int) -> int:
    try:
        print(run(seed))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _progress(done: int, of: int, failures: int) -> None:
    filled = 40 * done // of
    print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {100 * done // of:3d}%  {failures} failed", end="", file=sys.stderr)


def _summary(name: str, total: Any, failures: list[str], seconds: float) -> None:
    print(file=sys.stderr)
    for line in failures[:20]:
        print(line)
        print(f"    replay: python -m {name} --seed", line.split()[1].rstrip(":"))
    counts = {f.name: getattr(total, f.name) for f in fields(total) if f.name != "digest"}
    print("  ".join(f"{name} {value:,}" for name, value in counts.items()))
    print(f"event log {total.digest}")
    print(f"{len(failures)} failed, {seconds:.1f} s, {total.steps / seconds:,.0f} steps/s")

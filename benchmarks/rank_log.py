"""What the log of ranks costs per step: encode a plan, send it through the ring, and take in the outcomes.

python -m benchmarks.rank_log --ranks 2 --rows 1 4 16 --steps 5000 --between 300

The other ranks decode and check each record and answer at once; they compute nothing. `send` is the time that rank 0
spends before its own step, `step` adds the wait for the slowest rank's outcome. Before each plan, rank 0 is busy for
`--between` microseconds, as it is with the results and the schedule of real steps; the others wait meanwhile.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NoReturn

import numpy as np

from forebay.base.errors import EngineError
from forebay.engine.ranks.log import LogReader, LogWriter
from forebay.engine.ranks.outcome import DONE
from forebay.engine.ranks.ring import RING_BYTES, RingReader, RingWriter
from forebay.requests.step_plan import RowWrites, StepPlan


def decode_plan(step: int, num_rows: int) -> StepPlan:
    """Return a step of decodes, of which every eighth begins a page."""
    rows = np.arange(1, num_rows + 1)
    new = rows[::8]
    return StepPlan(
        step=step,
        num_extends=0,
        rows=rows,
        q_lens=np.ones(num_rows, dtype=np.int64),
        starts=np.empty(0, dtype=np.int64),
        input_ids=np.empty(0, dtype=np.int64),
        sample_mask=np.ones(num_rows, dtype=np.bool_),
        writes=RowWrites(write_rows=new, write_columns=new, write_pages=new),
    )


def follow(rank: int, memory: mmap.mmap, places: int, outcomes: int) -> NoReturn:
    """Be a rank that computes nothing, until rank 0 ends."""
    ring, log, number = RingReader(memory, places, outcomes), LogReader(rank), 0
    while (record := ring.read()) is not None:
        log.entry(record)
        ring.done(number, DONE)
        number += 1
    os._exit(0)


def _end(error: EngineError) -> NoReturn:
    raise error


def measure(num_ranks: int, num_rows: int, num_steps: int, between_s: float) -> tuple[list[float], list[float]]:
    """Return the seconds of each send, and of each step."""
    memory, ends = mmap.mmap(-1, RING_BYTES), []
    for rank in range(1, num_ranks):
        (their_places, places), (outcomes, their_outcomes) = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(places)
            follow(rank, memory, their_places, their_outcomes)
        os.close(their_places)
        ends.append((places, outcomes))
    ring = RingWriter(memory, [end[0] for end in ends], [end[1] for end in ends], on_lost=_end)
    log, sends, steps = LogWriter(), [], []
    for step in range(num_steps):
        plan = decode_plan(step, num_rows)
        ready = time.perf_counter() + between_s
        while time.perf_counter() < ready:
            pass
        began = time.perf_counter()
        ring.send(log.record(plan))
        sends.append(time.perf_counter() - began)
        ring.outcomes(step)
        steps.append(time.perf_counter() - began)
    for end in ends:
        for fd in end:
            os.close(fd)
    return sends, steps


def main(arguments: Sequence[str]) -> int:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_log", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--between", type=float, default=0, help="microseconds from an outcome to the next plan")
    options = parser.parse_args(arguments)
    for num_rows in options.rows:
        sends, steps = measure(options.ranks, num_rows, options.steps, options.between / 1e6)
        warm = options.steps // 10
        figures = {"send": sorted(sends[warm:]), "step": sorted(steps[warm:])}
        said = "  ".join(
            f"{name} {median(all_of) * 1e6:.1f} us (p99 {all_of[len(all_of) * 99 // 100] * 1e6:.1f})"
            for name, all_of in figures.items()
        )
        print(f"ranks {options.ranks}  rows {num_rows:>3}  {said}  load {os.getloadavg()[0]:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

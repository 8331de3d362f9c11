"""What the flight recorder costs a decode step: plan and commit with it and without it, in turn.

    python benchmarks/recorder.py [--running 1 8 64]

The real scheduler, over results that are made up; no model and no channel. Four steps with the recorder and four
without take turns, and the first of each four is not counted. A figure is the difference of a step's tenth percentiles,
which other work on the machine hardly changes, and that of its medians, in microseconds, beside the bytes that a step
takes in the recorder. Target: 5 us a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from forebay.base.record_buffer import RecordBuffer, shared_memory
from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.engine.recorder.recorder import start
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.scheduler.scheduler import Scheduler

BUFFER_BYTES = 16 << 20
PROMPT_LEN = 128
MEASURED_STEPS = 7000
TURN = 4  # steps


def _decoding(num_running: int) -> Scheduler:
    """Return a scheduler whose requests all decode."""
    config = SchedulerConfig(
        page_size=16,
        num_pages=num_running * 512,
        max_running_requests=num_running,
        context_length=1 << 13,
        chunked_prefill_size=1 << 14,
        max_queued_requests=num_running,
        ledger=Ledger.COUNT,
    )
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=(1 << 13) - PROMPT_LEN, temperature=0.0, ignore_eos=True)
    for i in range(num_running):
        scheduler.add(Request(i + 1, list(range(PROMPT_LEN)), params), 0.0)
    _step(scheduler)
    return scheduler


def _step(scheduler: Scheduler) -> float:
    """Plan and commit one step; return its seconds."""
    began = time.perf_counter()
    plan = scheduler.plan(0.0)
    planned = time.perf_counter()
    assert plan is not None, "nothing to decode"
    result = StepResult(token_ids=[7] * int(plan.sample_mask.sum()))
    committing = time.perf_counter()
    scheduler.commit(plan, result, 0.0)
    seconds = planned - began + time.perf_counter() - committing
    scheduler.take_updates()
    return seconds


def _tenth(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=10)[0]


def measure(num_running: int) -> dict[str, float]:
    """Return the cost of the recorder in us a step, the step without it, and its bytes a step."""
    memory = shared_memory("benchmark")
    assert memory is not None, "this system has no memory without a file"
    with memory:
        buffer = RecordBuffer.of(memory.fileno(), BUFFER_BYTES)
    scheduler = _decoding(num_running)
    start(scheduler, buffer)
    journal = scheduler.queues.journal
    plain, recorded = list[float](), list[float]()
    for number in range(MEASURED_STEPS):
        turn, inside = divmod(number, TURN)
        scheduler.queues.journal = journal if turn % 2 else None
        seconds = _step(scheduler)
        if inside:
            (recorded if turn % 2 else plain).append(seconds)
    content = buffer.content()
    num_bytes = sum(len(record) + 4 for record in content.records) + content.num_lost_bytes
    return {
        "running": num_running,
        "step_us": _tenth(plain) * 1e6,
        "recorder_us": (_tenth(recorded) - _tenth(plain)) * 1e6,
        "recorder_median_us": (statistics.median(recorded) - statistics.median(plain)) * 1e6,
        "bytes": num_bytes / (MEASURED_STEPS / 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON line for each number of running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 64])
    for num_running in parser.parse_args(argv).running:
        print(json.dumps({name: round(value, 2) for name, value in measure(num_running).items()}))


if __name__ == "__main__":
    main()

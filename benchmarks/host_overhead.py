"""Host time per decode step, everything but the model: plan, step inputs, commit, updates encoded.

    python benchmarks/host_overhead.py [--running 1 64] [--depth 0]

The model is replaced by a runner that prepares the step's inputs and samples nothing. Targets: 150 us at 1 running
request, 400 us at 64. Figures are medians over the steps of the best of five rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from forebay.config.engine_config import Ledger, SchedulerConfig
from forebay.engine.channel import FrameEncoder
from forebay.engine.core import EngineCore
from forebay.engine.frames import AddRequest, Updates
from forebay.pools.kv_pool import KvPool
from forebay.pools.request_rows import RequestRows
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.runtime.step_inputs import StepInputs
from forebay.scheduler.scheduler import Scheduler

PROMPT_LEN = 128
WARM_UP_STEPS = 20
MEASURED_STEPS = 400
NOTHING = np.empty(0, dtype=np.int64)
TARGETS_US = {1: 150, 64: 400}


class Nothing:
    """A launched step of no model."""

    def __init__(self, num_samples: int) -> None:
        self._token_ids = [7] * num_samples

    def result(self) -> StepResult:
        return StepResult(token_ids=self._token_ids)


class NoModel:
    """Takes a plan's inputs to the device, as the model runner does, and leaves it at that."""

    def __init__(self, config: SchedulerConfig) -> None:
        size, device = config.page_size, torch.device("cpu")
        kv = KvPool(
            num_layers=1,
            num_pages=config.num_pages,
            page_size=size,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device=device,
        )
        rows = RequestRows(config.max_running_requests, config.context_length // size, device=device)
        most = config.chunked_prefill_size + config.max_running_requests
        self._inputs = StepInputs(rows, kv, max_num_tokens=most, device=device)

    def launch(self, plan: StepPlan) -> Nothing:
        sample_rows = plan.rows[plan.sample_mask]
        self._inputs.stage(plan, sample_rows, NOTHING, NOTHING, NOTHING)
        return Nothing(len(sample_rows))


def measure(num_running: int, depth: int) -> float:
    """Median microseconds of a decode step."""
    config = SchedulerConfig(
        num_pages=num_running * 64 + 64,
        max_running_requests=num_running,
        context_length=1024,
        chunked_prefill_size=1 << 16,
        overlap_depth=depth,
        ledger=Ledger.COUNT,
    )
    core = EngineCore(Scheduler(config), NoModel(config), depth=depth, vocab_size=50_000)
    params = SamplingParams(max_new_tokens=WARM_UP_STEPS + MEASURED_STEPS + 20, ignore_eos=True)
    for i in range(1, num_running + 1):
        core.add(AddRequest(request_id=i, prompt_token_ids=list(range(i, i + PROMPT_LEN)), params=params))
    encoder = FrameEncoder()
    times: list[float] = []
    for _ in range(WARM_UP_STEPS + MEASURED_STEPS):
        begin = time.perf_counter()
        encoder.encode(Updates(updates=core.step()))
        times.append(time.perf_counter() - begin)
    assert core.scheduler.num_running == num_running
    return statistics.median(times[WARM_UP_STEPS:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--depth", type=int, choices=(0, 1), default=0)
    args = parser.parse_args()
    for num_running in args.running:
        best = min(measure(num_running, args.depth) for _ in range(5))
        figures = {"running": num_running, "depth": args.depth, "host_us_per_step": round(best, 1)}
        print(json.dumps(figures | {"target_us": TARGETS_US.get(num_running)}))


if __name__ == "__main__":
    main()

"""Host time per decode step, everything but the model: plan, step inputs, runner, commit, updates encoded.

    python benchmarks/host_overhead.py [--running 1 64] [--depth 0] [--hybrid]

The real scheduler and model runner, over a model that computes nothing; with --hybrid one whose layers keep windows and
recurrent states too. Targets: 150 us at 1 running request, 400 us at 64. Figures are medians over the steps of the best
of five rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.backends import make_ops
from forebay.config.engine_config import CacheTypes, KindConfig, Ledger, SchedulerConfig
from forebay.engine.channel import FrameEncoder
from forebay.engine.frames import AddRequest, Updates
from forebay.engine.loop.core import EngineCore
from forebay.layers.context import ForwardContext
from forebay.memory.budget import PoolSizes
from forebay.pools.cache_spec import CacheSpec, FullAttention, RecurrentState, SlidingWindow
from forebay.requests.sampling_params import SamplingParams
from forebay.runtime import ModelRunner, build_runner
from forebay.scheduler.scheduler import Scheduler

PROMPT_LEN = 128
WINDOW_PAGES = 128  # of each request: its window, the margin behind it, and the chunks of its prompt in flight
WARM_UP_STEPS = 20
MEASURED_STEPS = 400
VOCAB = 8
WINDOW = 512
TARGETS_US = {1: 150, 64: 400}


class NoModel:
    """A model that computes nothing, over a vocabulary so small that sampling from it is nothing too."""

    weight_bytes = 0
    adapters = None
    mrope = False
    generates = True

    def __init__(self, hybrid: bool) -> None:
        self._hybrid = hybrid
        self._hidden = torch.zeros(1 << 17, 1)
        self._logits = torch.zeros(1 << 10, VOCAB)

    def cache_specs(self) -> Sequence[CacheSpec]:
        full = FullAttention(num_kv_heads=1, head_dim=1)
        if not self._hybrid:
            return (full,)
        return (full, SlidingWindow(num_kv_heads=1, head_dim=1, window=WINDOW), RecurrentState(conv=(1, 3), ssm=(1,)))

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        return self._hidden[: len(input_ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


def runner(config: SchedulerConfig) -> ModelRunner:
    return build_runner(
        NoModel(hybrid=bool(config.kinds.num_slots)),
        sizes=PoolSizes(
            num_slots={"kv": config.num_pages, **config.kinds.num_slots},
            page_size=config.page_size,
            max_running_requests=config.max_running_requests,
            context_length=config.context_length,
        ),
        ops=make_ops("native", 1),
        max_num_tokens=config.chunked_prefill_size + config.max_running_requests,
        vocab_size=50_000,
        types=CacheTypes(),
        device="cpu",
    )


def measure(num_running: int, depth: int, hybrid: bool) -> float:
    """Median microseconds of a decode step."""
    config = SchedulerConfig(
        num_pages=num_running * 64 + 64,
        max_running_requests=num_running,
        context_length=1024,
        chunked_prefill_size=num_running * PROMPT_LEN,
        overlap_depth=depth,
        ledger=Ledger.COUNT,
        kinds=KindConfig(
            num_slots={"state": num_running * 4, "window": num_running * WINDOW_PAGES}, num_read={"window": WINDOW}
        )
        if hybrid
        else KindConfig(),
    )
    core = EngineCore(Scheduler(config), runner(config), vocab_size=50_000)
    params = SamplingParams(max_tokens=WARM_UP_STEPS + MEASURED_STEPS + 20, temperature=0.0, ignore_eos=True)
    for i in range(1, num_running + 1):
        core.add(AddRequest(request_id=i, prompt_token_ids=list(range(i, i + PROMPT_LEN)), params=params))
    encoder = FrameEncoder()
    times: list[float] = []
    for _ in range(WARM_UP_STEPS + MEASURED_STEPS):
        begin = time.perf_counter()
        encoder.encode(Updates.pack(core.step()))
        times.append(time.perf_counter() - begin)
    assert core.scheduler.queues.num_running == num_running
    return statistics.median(times[WARM_UP_STEPS:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--depth", type=int, choices=(0, 1), default=0)
    parser.add_argument("--hybrid", action="store_true")
    args = parser.parse_args()
    for num_running in args.running:
        best = min(measure(num_running, args.depth, args.hybrid) for _ in range(5))
        figures = {
            "running": num_running,
            "depth": args.depth,
            "hybrid": args.hybrid,
            "host_us_per_step": round(best, 1),
        }
        print(json.dumps(figures | {"target_us": TARGETS_US.get(num_running)}))


if __name__ == "__main__":
    main()

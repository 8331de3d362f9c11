"""Milliseconds of a decode step on a GPU, with graphs and without, against what reading its bytes must take.

    python benchmarks/gpu_decode.py                          # an 8B llama and a 7B Falcon-H1, bfloat16; 60 GB of memory
    python benchmarks/gpu_decode.py --like llama --batch 1 16
    python benchmarks/gpu_decode.py --tiny --device cpu      # seconds: that this program works

The models have the shapes of Llama-3.1-8B and Falcon-H1-7B and random weights, which are made on the device itself: no
file is read, no copy made. Steps go through the engine core, scheduler included, with one step in flight. The floor is
the bytes of a step (weights, KV, states read and written) over the bandwidth of a large copy measured just before; the
host's time is the part of a step in which nothing waits for the device. On a CPU that is nearly all of it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forebay.backends import make_ops
from forebay.config.engine_config import EngineConfig
from forebay.config.resolve import Survey, resolve
from forebay.engine.frames import AddRequest
from forebay.engine.lifecycle.sizing import memory_demand, scheduler_config
from forebay.engine.loop.core import EngineCore
from forebay.families.model_config import ModelConfig, config_from_folder
from forebay.formats.weight_shapes import WeightKind, WeightShapes
from forebay.layers.params import Change, TensorParam, unchanged
from forebay.memory.division import divide_memory
from forebay.memory.kinds.build import CacheSizes
from forebay.models import Needs, describe, needs_of
from forebay.models.decoder import Model
from forebay.models.random_weights import random_tensor
from forebay.ops import LinearWeight, Ops
from forebay.pools.cache_spec import cache_sizes
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import Launched, StepPlan, StepResult
from forebay.runtime import ModelRunner, build_runner
from forebay.runtime.graphs.backends import Eager
from forebay.scheduler.scheduler import Scheduler

DTYPE = torch.bfloat16
WARM_UP_STEPS = 4
COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "falcon_h1": {
        "vocab_size": 130_048,
        "hidden_size": 3072,
        "num_hidden_layers": 44,
        "intermediate_size": 12_288,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "falcon_h1": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4}
    | {"mamba_d_head": 16, "mamba_d_state": 16},
}


class RandomWeights:
    """The `Weights` of a model that nobody has trained, made where they are used, tensor by tensor."""

    def __init__(self, needs: Needs, ops: Ops, device: str) -> None:
        self.dtype, self.device = DTYPE, device
        self.held_bytes = {"bfloat16": sum(param.num_elements for param in needs.params) * DTYPE.itemsize}
        self.numbers: list[float] = []
        self._ops = ops
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, param: TensorParam, *, float32: bool = False, change: Change = unchanged) -> Tensor:
        dtype = torch.float32 if float32 else DTYPE
        parts = []
        with torch.device(self.device):
            for name, shape in param.parts():
                values = random_tensor(name, shape, self._generator, offset=param.offset)
                parts.append(values.add_(param.offset).to(dtype))
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        if param.rows:
            joined = torch.cat([joined[rows.start : rows.stop : rows.step] for rows in param.rows])
        return change(joined)

    def number(self, param: TensorParam) -> float:
        self.numbers.append(value := self.tensor(param, float32=True).item())
        return value

    def linear(self, weight: TensorParam, bias: TensorParam | None) -> LinearWeight:
        return self._ops.linear.pack(self.tensor(weight), None if bias is None else self.tensor(bias))

    def table(self, param: TensorParam) -> Tensor:
        return self.tensor(param)


class Watched:
    """A runner, and how long its steps were waited for."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.waited_s = 0.0

    def launch(self, plan: StepPlan) -> Launched:
        return WatchedStep(self, self._runner.launch(plan))


@dataclass(frozen=True, slots=True)
class WatchedStep:
    runner: Watched
    step: Launched

    def result(self) -> StepResult:
        start = time.perf_counter()
        result = self.step.result()
        self.runner.waited_s += time.perf_counter() - start
        return result


@dataclass(frozen=True, slots=True)
class Figures:
    step_ms: float
    host_ms: float


class Bench:
    """One model on one device: its weights once, an engine for each kind of run."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.config, self.engine = _configurations(kind, args)
        needs, self.spec = needs_of(self.config), describe(self.config)
        self.ops = make_ops(self.engine.kernels, self.engine.num_threads)
        weights = RandomWeights(needs, self.ops, self.device)
        with torch.inference_mode():
            self.model = Model(self.spec, self.ops, weights, num_positions=self.config.max_position_embeddings)
        self.sizes = cache_sizes(needs.cache_specs, self.engine.types)

    def measure(self, batch: int, *, graphs: bool) -> Figures:
        """The median of `--repeats` runs of `--steps` steps of a batch whose prompts are done."""
        config = replace(
            self.engine,
            memory=replace(self.engine.memory, max_running_requests=batch),
            scheduling=replace(self.engine.scheduling, overlap_depth=1),
        )
        budget = divide_memory(memory_demand(config, self.sizes, self.config))
        runner = build_runner(
            self.model,
            sizes=replace(budget, max_running_requests=batch),
            ops=self.ops,
            max_num_tokens=config.scheduling.chunked_prefill_size + batch,
            vocab_size=self.config.vocab_size,
            types=config.types,
            device=self.device,
            graphs=None if graphs else Eager(),
            graph_sizes=[batch],
        )
        while runner.capture_next():
            pass
        scheduler = Scheduler(scheduler_config(config, budget, self.model.weight_bytes))
        watched = Watched(runner)
        core = EngineCore(scheduler, watched, vocab_size=self.config.vocab_size)
        self._fill(core, batch)
        runs = [self._run(core, watched) for _ in range(self.args.repeats)]
        return min(runs, key=lambda run: abs(run.step_ms - statistics.median(r.step_ms for r in runs)))

    def _fill(self, core: EngineCore, batch: int) -> None:
        """Compute the prompts; from then on each step decodes all of them."""
        params = SamplingParams(max_tokens=_room(self.args), temperature=0.0, ignore_eos=True)
        for i in range(batch):
            prompt = [(7 * i + 3 * j) % self.config.vocab_size for j in range(self.args.context)]
            refused = core.add(AddRequest(request_id=i + 1, prompt_token_ids=prompt, params=params))
            assert not refused, refused
        decoding = 0
        while decoding < WARM_UP_STEPS:
            brought = sum(len(update.token_ids) for update in core.step())
            decoding += brought == batch and len(core.scheduler.queues.running) == batch

    def _run(self, core: EngineCore, watched: Watched) -> Figures:
        waited, start = watched.waited_s, time.perf_counter()
        for _ in range(self.args.steps):
            updates = core.step()
            assert not any(update.finish for update in updates), f"a request has ended: {updates}"
        seconds = time.perf_counter() - start
        host = seconds - (watched.waited_s - waited)
        return Figures(1e3 * seconds / self.args.steps, 1e3 * host / self.args.steps)

    def bytes_of_step(self, batch: int) -> int:
        """What a step must read, and of states write: of the embedding only rows, unless it is the head too."""
        unread = 0 if self.spec.tied else self.spec.embedding.num_elements * DTYPE.itemsize
        context = self.args.context + _room(self.args) // 2
        return self.model.weight_bytes - unread + batch * _bytes_of_request(self.sizes, context)


def _bytes_of_request(sizes: CacheSizes, context: int) -> int:
    in_window = min(context, sizes.num_read("window")) * sizes.num_bytes("window")
    return context * sizes.kv_bytes_per_token + in_window + 2 * sizes.num_bytes("state")


def _room(args: argparse.Namespace) -> int:
    """Tokens that a request may grow by."""
    return args.steps * args.repeats + WARM_UP_STEPS + 16 + 2 * max(args.batch)


def _configurations(kind: str, args: argparse.Namespace) -> tuple[ModelConfig, EngineConfig]:
    """As `forebay serve` would have them for a checkpoint of this configuration, but for what would end a run early."""
    values = MODELS[kind] | (TINY[kind] if args.tiny else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": kind, "dtype": "bfloat16", **values}))
        wanted = {
            "model": folder,
            "device": args.device,
            "dtype": "bfloat16",
            "context_length": args.context + _room(args),
            "max_running_requests": max(args.batch),
            "max_total_tokens": max(args.batch) * (args.context + _room(args) + 16),
            "disable_radix_cache": True,
        }
        config = resolve(wanted, survey=Survey(model=_shape))
        model = config_from_folder(Path(folder))
    times = dict.fromkeys(("queue_timeout_s", "request_timeout_s", "stall_timeout_s"), math.inf)
    patient = replace(config.engine, scheduling=replace(config.engine.scheduling, **times))
    return model, patient


def _shape(path: Path, draft_head: bool, mmproj: Path | None) -> tuple[ModelConfig, WeightShapes]:
    config = config_from_folder(path)
    kinds = (
        (WeightKind(None, param.joined_shape[-1], 16), param.num_elements)
        for param in needs_of(config, draft_head=draft_head).params
    )
    return config, WeightShapes.of(kinds)


def bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="which models")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", help="requests at once")
    parser.add_argument("--context", type=int, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of one run")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--tiny", action="store_true", help="small models and batches, a few steps")
    args = parser.parse_args()
    args.batch = args.batch or ([1, 4] if args.tiny else [1, 16, 64, 256])
    args.context = args.context or (16 if args.tiny else 1024)
    if args.tiny:
        args.steps = min(args.steps, 4)
    speed = bandwidth(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}: copies at {speed / 1e9:.0f} GB/s; contexts from {args.context} tokens; bfloat16\n")
    print("| model | batch | floor, ms | graphs, ms | of floor | host, ms | no graphs, ms | host, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in args.like:
        bench = Bench(kind, args)
        name = f"{kind}-like, {bench.model.weight_bytes / 1e9:.2f} GB"
        for batch in args.batch:
            floor = 1e3 * bench.bytes_of_step(batch) / speed
            fast, slow = (bench.measure(batch, graphs=graphs) for graphs in (True, False))
            print(
                f"| {name} | {batch} | {floor:.3f} | {fast.step_ms:.3f} | {floor / fast.step_ms:.0%} "
                f"| {fast.host_ms:.3f} | {slow.step_ms:.3f} | {slow.host_ms:.3f} |",
                flush=True,
            )
        del bench


if __name__ == "__main__":
    main()

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
import functools
import json
import math
import statistics
import tempfile
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_models import MODELS, TINY
from forebay.backends import make_ops
from forebay.base.scan_rows import CHUNK
from forebay.config.engine_config import EngineConfig
from forebay.config.resolve import Survey, resolve
from forebay.engine.frames import AddRequest
from forebay.engine.lifecycle.sizing import memory_demand, scheduler_config
from forebay.engine.loop.core import EngineCore
from forebay.families.config.model_config import ModelConfig, config_from_folder
from forebay.formats.quantized import (
    SCALE_DTYPES,
    CodeFormat,
    GroupQuantized,
    Levels,
    ScaleType,
    StoredCodes,
    stored_codes,
)
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


@dataclass(frozen=True, slots=True)
class Codes:
    """The matrices that are in codes, by a part of their names, and their format."""

    form: CodeFormat
    part: str = "layers."

    def holds(self, param: TensorParam) -> bool:
        """Return whether the matrix is in codes."""
        return self.part in param.names[0] and len(param.joined_shape) == 2


class RandomWeights:
    """The `Weights` of a model that nobody has trained, made where they are used, tensor by tensor."""

    def __init__(self, needs: Needs, ops: Ops, device: str, codes: Codes | None = None) -> None:
        self.dtype, self.device = DTYPE, device
        coded = [param for param in needs.params if codes is not None and codes.holds(param)]
        in_codes = sum(param.num_elements for param in coded)
        dense = sum(param.num_elements for param in needs.params) - in_codes
        self.held_bytes = {"bfloat16": dense * DTYPE.itemsize}
        if codes is not None:
            self.held_bytes["codes"] = codes.form.num_bytes(in_codes)
        self.numbers: list[float] = []
        self._ops, self._codes = ops, codes
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
        codes, added = self._codes, None if bias is None else self.tensor(bias)
        if codes is not None and codes.holds(weight):
            outputs, inputs = weight.joined_shape
            return self._ops.linear.pack_quantized(random_codes(codes.form, outputs, inputs), added)
        return self._ops.linear.pack(self.tensor(weight), added)

    def table(self, param: TensorParam) -> Tensor:
        return self.tensor(param)


@functools.cache
def random_codes(form: CodeFormat, outputs: int, inputs: int) -> StoredCodes:
    """Return codes of a matrix, whose values are about as large as those of trained ones."""
    draw = np.random.default_rng(0).integers(0, 1 << form.bits, 1 << 16, dtype=np.uint8)
    if form.levels is Levels.E4M3:
        draw &= 0xBF  # no NaN
    size = outputs, inputs // form.group
    value = 120 if form.scales is ScaleType.E8M0 else 0.02 * inputs**-0.5
    scales = np.full(size, value, SCALE_DTYPES[form.scales])
    minimums = np.full(size, -0.1 * inputs**-0.5, np.float16) if form.minimums else None
    codes = np.resize(draw, (outputs, inputs))
    weight = GroupQuantized(format=form, codes=codes, scales=scales, minimums=minimums)
    return stored_codes(form, (outputs, inputs), lambda: weight.rows)


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

    def __init__(
        self,
        kind: str,
        args: argparse.Namespace,
        codes: Codes | None = None,
        *,
        fp8_inputs: bool = False,
        kv_dtype: str | None = None,
    ) -> None:
        self.args, self.device, self._kind, self._codes, self._kv_dtype = args, args.device, kind, codes, kv_dtype
        self.config, self.engine = self._configurations(max(args.batch), args.context + _room(args))
        needs, self.spec = needs_of(self.config), describe(self.config)
        self.params = needs.params
        self.ops = make_ops(self.engine.kernels, self.engine.num_threads, fp8_inputs=fp8_inputs)
        weights = RandomWeights(needs, self.ops, self.device, codes)
        with torch.inference_mode():
            self.model = Model(self.spec, self.ops, weights, num_positions=self.config.max_position_embeddings)
        self.sizes = cache_sizes(needs.cache_specs, self.engine.types)

    def measure(self, batch: int, *, graphs: bool) -> Figures:
        """The median of `--repeats` runs of `--steps` steps of a batch whose prompts are done."""
        core, watched = self.engine_of(batch, self.args.context + _room(self.args), graphs=graphs)
        self.fill(core, batch, self.args.context, _room(self.args))
        runs = [run_steps(core, watched, self.args.steps) for _ in range(self.args.repeats)]
        return min(runs, key=lambda run: abs(run.step_ms - statistics.median(r.step_ms for r in runs)))

    def engine_of(
        self, batch: int, tokens: int, *, graphs: bool = True, prompt: int | None = None
    ) -> tuple[EngineCore, Watched]:
        """Return an engine for `batch` requests of so many tokens, with one step in flight, and its runner.

        All its graphs are captured, or of those with prompts the one that holds `prompt` tokens alone.
        """
        _, engine = self._configurations(batch, tokens)
        config = replace(engine, scheduling=replace(engine.scheduling, overlap_depth=1))
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
        if prompt is not None and runner.extend is not None and (captured := runner.extend.captured) is not None:
            sizes = captured.sizes
            captured.sizes = sizes[bisect_left(sizes, prompt) :][:1] or sizes[-1:]
        while runner.capture_next():
            pass
        watched = Watched(runner)
        scheduler = Scheduler(scheduler_config(config, budget, self.model.weight_bytes))
        return EngineCore(scheduler, watched, vocab_size=self.config.vocab_size), watched

    def add(self, core: EngineCore, number: int, length: int, max_tokens: int) -> None:
        """Add a request of its own prompt."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = [(7 * number + 3 * j) % self.config.vocab_size for j in range(length)]
        refused = core.add(AddRequest(request_id=number, prompt_token_ids=prompt, params=params))
        assert not refused, refused

    def fill(self, core: EngineCore, batch: int, context: int, max_tokens: int) -> None:
        """Compute the prompts; from then on each step decodes all of them."""
        for number in range(1, batch + 1):
            self.add(core, number, context, max_tokens)
        decoding = 0
        while decoding < WARM_UP_STEPS:
            brought = sum(len(update.token_ids) for update in core.step())
            decoding += brought == batch and len(core.scheduler.queues.running) == batch

    def bytes_of_step(self, batch: int, context: int) -> float:
        """What a step must read, and of states write: of the embedding only rows, unless it is the head too, and of
        experts those that this number of random choices reaches."""
        unread = 0.0 if self.spec.tied else self.spec.embedding.num_elements * DTYPE.itemsize
        if (experts := self.config.experts) is not None:
            missed = (1 - experts.per_token / experts.num_experts) ** batch
            unread += missed * self.expert_bytes
        # Of states in chunks a step reads all and writes one in so many as a chunk has tokens (decision 68).
        moved = 1 + 1 / CHUNK if self.engine.types.chunked_scans else 2.0
        return self.model.weight_bytes - unread + batch * _bytes_of_request(self.sizes, context, moved)

    @property
    def num_expert_weights(self) -> int:
        """The weights that only some tokens are multiplied by."""
        return sum(param.num_elements for param in self.params if ".experts." in param.names[0])

    @property
    def expert_bytes(self) -> int:
        """The bytes of these."""
        count = self.num_expert_weights
        return count * DTYPE.itemsize if self._codes is None else self._codes.form.num_bytes(count)

    def _configurations(self, batch: int, tokens: int) -> tuple[ModelConfig, EngineConfig]:
        return _configurations(self._kind, self.args, batch, tokens, self._kv_dtype)


def run_steps(core: EngineCore, watched: Watched, steps: int) -> Figures:
    """Return the milliseconds of a step in which nothing ends."""
    waited, start = watched.waited_s, time.perf_counter()
    for _ in range(steps):
        updates = core.step()
        assert not any(update.finish for update in updates), f"a request has ended: {updates}"
    seconds = time.perf_counter() - start
    host = seconds - (watched.waited_s - waited)
    return Figures(1e3 * seconds / steps, 1e3 * host / steps)


def _bytes_of_request(sizes: CacheSizes, context: int, moved: float) -> float:
    in_window = min(context, sizes.num_read("window")) * sizes.num_bytes("window")
    return context * sizes.kv_bytes_per_token + in_window + moved * sizes.num_bytes("state")


def _room(args: argparse.Namespace) -> int:
    """Tokens that a request may grow by."""
    return args.steps * args.repeats + WARM_UP_STEPS + 16 + 2 * max(args.batch)


def _configurations(
    kind: str, args: argparse.Namespace, batch: int, tokens: int, kv_dtype: str | None
) -> tuple[ModelConfig, EngineConfig]:
    """As `forebay serve` would have them for a checkpoint of this configuration, but for what would end a run early."""
    values = MODELS[kind] | (TINY[kind] if args.tiny else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": kind, "dtype": "bfloat16", **values}))
        wanted = {
            "model": folder,
            "device": args.device,
            "dtype": "bfloat16",
            "context_length": tokens,
            "max_running_requests": batch,
            "max_total_tokens": batch * (tokens + 16),
            "disable_radix_cache": True,
            **({"kv_cache_dtype": kv_dtype} if kv_dtype else {}),
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
    parser.add_argument("--like", nargs="+", choices=tuple(MODELS), default=["llama", "falcon_h1"], help="which models")
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
            floor = 1e3 * bench.bytes_of_step(batch, args.context + _room(args) // 2) / speed
            fast, slow = (bench.measure(batch, graphs=graphs) for graphs in (True, False))
            print(
                f"| {name} | {batch} | {floor:.3f} | {fast.step_ms:.3f} | {floor / fast.step_ms:.0%} "
                f"| {fast.host_ms:.3f} | {slow.step_ms:.3f} | {slow.host_ms:.3f} |",
                flush=True,
            )
        del bench


if __name__ == "__main__":
    main()

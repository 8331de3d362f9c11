"""Report of a start: rows of the start-up table and of /server_info."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from forebay.base.cpu import CPU_VARIABLE, PROC, this_cpu
from forebay.base.topology import this_topology
from forebay.base.units import human_bytes, human_seconds
from forebay.config.engine_config import EngineConfig
from forebay.engine.lifecycle.packed_cache import PackedCache
from forebay.memory.budget import MemoryBudget
from forebay.models.network import Network
from forebay.ops import Ops
from forebay.pools.cache_spec import cache_sizes
from forebay.runtime import ModelRunner
from forebay.runtime.drafts.model import DraftModel

Report = list[tuple[str, str, str, str]]
"""Rows (section, item, value, reason)."""


def start_report(
    config: EngineConfig,
    budget: MemoryBudget,
    model: Network,
    runner: ModelRunner,
    ops: Ops,
    load: tuple[float, PackedCache],
) -> Report:
    """Rows (section, item, value, reason) for the start-up table and /server_info: planned against actual."""
    (load_seconds, cache), allocated = load, runner.cache.num_bytes
    return [
        ("model", "weights", human_bytes(model.weight_bytes), f"{_forms(model)} on {config.device}"),
        *_of_draft_model(config, runner),
        *_of_adapters(config, model),
        *_of_encoder(runner),
        *_of_ranks(config, model.weight_bytes, sum(allocated.values())),
        ("model", "kernels", ops.name, _why_kernels(config, ops)),
        *_of_products(ops),
        *_of_fallbacks(ops),
        ("model", "decode graphs", runner.decode.captured.backend.name, _sizes_of_graphs(runner)),
        ("model", "load time", human_seconds(load_seconds), "until the first step could run"),
        ("model", "weights cache", *cache.outcome),
        *(("memory", line.item, line.value, line.reason) for line in budget.lines),
        *(
            ("memory", f"{kind} cache allocated", human_bytes(allocated[kind]), f"{human_bytes(planned)} planned")
            for kind, planned in budget.num_bytes.items()
            if planned
        ),
        *_of_pictures(config, runner),
        _of_memory_saver(config),
        of_process(),
    ]


def _of_ranks(config: EngineConfig, weight_bytes: int, cache_bytes: int) -> Report:
    if config.ranks.size == 1:
        return []
    own = f"rank 0 has {human_bytes(weight_bytes)} of weights and {human_bytes(cache_bytes)} of caches"
    return [
        ("model", "ranks", str(config.ranks.size), f"{own}; this table is about rank 0"),
        ("model", "exchange of ranks", config.ranks.exchange, _why_exchange(config)),
    ]


def _why_exchange(config: EngineConfig) -> str:
    if config.device == "cpu":
        return "on this machine's CPU"
    where = "a GPU for each rank" if config.ranks.own_gpus else "one GPU for all ranks"
    return f"{where}; not measured: this version never ran ranks on a GPU"


def _why_kernels(config: EngineConfig, ops: Ops) -> str:
    cpu = this_cpu()
    missing = cpu.lacks if config.device == "cpu" else ""
    simulated = f"{CPU_VARIABLE}={cpu.simulated} simulates this CPU" if cpu.simulated else ""
    nodes = len(this_topology().nodes)
    where = f" on {nodes} nodes" if nodes > 1 and config.device == "cpu" else ""
    asked = f"{config.kernels} asked, {config.num_threads} threads{where}"
    rounding = f"inputs of codes rounded to {ops.activation_bits} bits" if ops.activation_bits else ""
    in_fp8 = "inputs of weights in FP8 rounded to FP8, by groups of 128" if ops.fp8_inputs else ""
    return "; ".join(filter(None, (asked, rounding, in_fp8, simulated, missing)))


def _of_products(ops: Ops) -> Report:
    return [("model", f"products, {shape}", choice.name, choice.why) for shape, choice in ops.product_choices.items()]


def _of_fallbacks(ops: Ops) -> Report:
    """Ops that torch computes: slower, and with bits that may depend on the batch."""
    return [("model", f"op {name}", "torch", f"no kernel compiles: {why}") for name, why in ops.fallbacks.items()]


def _of_draft_model(config: EngineConfig, runner: ModelRunner) -> Report:
    if not isinstance(runner.proposer, DraftModel):
        return []
    model = runner.proposer.drafting.model
    per_token = human_bytes(cache_sizes(model.cache_specs(), config.types).kv_bytes_per_token)
    return [("model", "draft model", human_bytes(model.weight_bytes), f"{_forms(model)}; {per_token} of KV per token")]


def _of_adapters(config: EngineConfig, model: Network) -> Report:
    if model.adapters is None:
        return []
    options = config.adapters
    why = f"{options.max_loras} slots of rank {options.max_lora_rank}, {len(options.lora_modules)} loaded at the start"
    return [("model", "adapters", human_bytes(model.adapters.num_bytes), why)]


def _of_encoder(runner: ModelRunner) -> Report:
    if runner.encodings is None:
        return []
    encoder = runner.encodings.encoder
    why = f"{encoder.num_layers} layers of the images' encoder"
    return [("model", "encoder", human_bytes(encoder.weight_bytes), why)]


def _of_pictures(config: EngineConfig, runner: ModelRunner) -> Report:
    if runner.encodings is None:
        return []
    when = "which take memory as they come" if config.device == "cpu" else "whose half is taken at the start"
    why = f"--mm-cache-bytes: half for pixels, half for encodings, {when}"
    return [("memory", "images", human_bytes(config.pictures.mm_cache_bytes), why)]


def _of_memory_saver(config: EngineConfig) -> tuple[str, str, str, str]:
    if config.device == "cpu":
        return "memory", "memory saver", "on", "always on a CPU; weights are read again, so that nothing is kept twice"
    backup = (
        "weights in host memory meanwhile" if config.weights_cpu_backup else "weights stay: no --weights-cpu-backup"
    )
    saver = ("on", backup) if config.enable_memory_saver else ("off", "without --enable-memory-saver")
    return "memory", "memory saver", *saver


def _forms(model: Network) -> str:
    """`61.7 MiB in 4 bits, 24.9 MiB in 8 bits, 0.1 MiB in bfloat16`."""
    return ", ".join(f"{human_bytes(size)} in {form}" for form, size in model.held_bytes.items())


def _sizes_of_graphs(runner: ModelRunner) -> str:
    sizes = runner.decode.captured.sizes
    return f"{len(sizes)} batch sizes up to {sizes[-1]}, captured when needed or idle"


def of_process(proc: Path = PROC) -> tuple[str, str, str, str]:
    """Return the row of the process's present memory, or of its maximum if the system does not report the present
    one."""
    try:
        pages = int((proc / "self" / "statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return "memory", "process", human_bytes(peak), f"the most resident so far: {proc} is not mounted"
    return "memory", "process", human_bytes(pages * os.sysconf("SC_PAGE_SIZE")), "resident after warm-up"

"""What adapters (LoRA) cost: tokens per second of decoding streams, of engines with and without.

    python -m benchmarks.adapters                   # the default model, rank 16 on seven projections of each layer
    python -m benchmarks.adapters --streams 1 16 --rounds 5
    python -m benchmarks.adapters --loads 20        # what loads cost a stream beside them

One engine at a time runs each workload; rounds alternate between them, and a figure is the median of its ratios to the
engine without adapters in the same round.

With `--loads` one stream decodes in an engine process while an adapter is loaded and unloaded again and again. The gaps
between its tokens are in medians of those without a load; rounds without a load say what the machine does by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay import LLM, AsyncEngine, SamplingParams
from forebay.engine.frames import AddRequest
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.safetensors_writer import Entry, write_safetensors
from forebay.models import AdapterSlots, needs_of

PROMPT_TOKENS: Final = 32
NUM_ADAPTERS: Final = 8
FIRST_GAPS: Final = 8  # tokens before a load begins
UNLOADED_GAPS: Final = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or name; the default model without it")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64, help="that each stream generates")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", type=int, default=0, help="measure so many loads instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.loads:
            asyncio.run(measure_loads(arguments, Path(folder)))
        else:
            measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    flags: dict[str, Any] = {"context_length": 512, "max_running_requests": max(arguments.streams)}
    with LLM(arguments.model, **flags, speculative_algorithm="off") as base:
        slots = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": arguments.rank}
        with LLM(arguments.model, **flags, **slots, speculative_algorithm="off") as adapted:
            names = [f"adapter-{number}" for number in range(NUM_ADAPTERS)]
            layers = adapted._core.adapters._memory._layers  # type: ignore[union-attr]
            for number, name in enumerate(names):
                adapted.load_adapter(name, str(make(folder / name, layers, arguments.rank, seed=number)))
            for streams in arguments.streams:
                cases: dict[str, tuple[LLM, list[str]]] = {
                    "without": (base, [""]),
                    "configured, unused": (adapted, [""]),
                    "one adapter": (adapted, names[:1]),
                    **({f"{NUM_ADAPTERS} adapters": (adapted, names)} if streams > 1 else {}),
                }
                report(streams, cases, arguments)


def report(streams: int, cases: dict[str, tuple[LLM, list[str]]], arguments: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(arguments.rounds + 1):
        for name, (llm, adapters) in cases.items():
            rate = tokens_per_second(llm, adapters, streams, arguments.tokens)
            if number:  # the first round warms up
                rates[name].append(rate)
    for name, found in rates.items():
        ratio = statistics.median(own / other for own, other in zip(found, rates["without"], strict=True))
        print(f"{streams:3} streams, {name:20} {statistics.median(found):8.1f} tok/s, {ratio:.3f}x", flush=True)


def tokens_per_second(llm: LLM, adapters: Sequence[str], streams: int, count: int) -> float:
    """Of decoding alone: prompts are computed before the clock starts."""
    core, params = llm._core, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True).with_seed()
    rng = np.random.default_rng(time.monotonic_ns())
    for number in range(streams):
        prompt = rng.integers(100, 1000, PROMPT_TOKENS).tolist()
        adapter = adapters[number % len(adapters)]
        refused = core.add(
            AddRequest(request_id=next(llm._engine.ids), prompt_token_ids=prompt, params=params, adapter=adapter)
        )
        assert not refused, refused
    begun: set[int] = set()
    while len(begun) < streams:
        begun |= {update.request_id for update in core.step() if update.token_ids}
    start, made = time.perf_counter(), 0
    while not core.idle:
        made += sum(len(update.token_ids) for update in core.step())
    return made / (time.perf_counter() - start)


async def measure_loads(arguments: argparse.Namespace, folder: Path) -> None:
    slots = {"enable_lora": True, "max_loras": 1, "max_lora_rank": arguments.rank}
    flags: dict[str, Any] = {"context_length": 512, "max_running_requests": 1, "speculative_algorithm": "off"}
    async with AsyncEngine.start(arguments.model, **flags, **slots) as engine:
        layers = needs_of(open_checkpoint(Path(engine.link.process.config.model_path)).config, adapters=AdapterSlots())
        path = make(folder / "adapter", dict(layers.adaptable), arguments.rank, seed=0)
        size = (path / "adapter_model.safetensors").stat().st_size
        gaps: dict[bool, list[list[float]]] = {False: [], True: []}
        usable: list[float] = []

        async def load() -> None:
            start = time.perf_counter()
            await engine.load_adapter("loaded", str(path))
            usable.append(time.perf_counter() - start)

        for number in range(2 * arguments.loads + 2):
            loads = number % 2 == 1
            found = await gaps_beside(engine, load if loads else None)
            if loads:
                await engine.unload_adapter("loaded")
            if number > 1:  # the first two warm up
                gaps[loads].append(found)
    step = statistics.median(gap for found in gaps[False] for gap in found)
    print(
        f"{size / 1e6:.1f} MB, usable after {statistics.median(usable):.3f} s (median), {max(usable):.3f} s (longest)"
    )
    for loads, name in ((False, "no load"), (True, "loading")):
        largest = sorted(max(found) / step for found in gaps[loads])
        share = sum(gap > 2 * step for found in gaps[loads] for gap in found) / sum(map(len, gaps[loads]))
        print(
            f"{name:8} median gap {1e3 * statistics.median(gap for found in gaps[loads] for gap in found):.2f} ms, "
            f"largest gap in medians: {statistics.median(largest):.2f} (median), {largest[-1]:.2f} (largest), "
            f"above two: {share:.2%}"
        )


async def gaps_beside(engine: AsyncEngine, load: Callable[[], Awaitable[None]] | None) -> list[float]:
    """Return the gaps between tokens of a stream, from the eighth on, where the load begins, until that is complete;
    without one as many as a load of half a second would take."""
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    async with engine.submit(prompt_token_ids=list(range(100, 100 + PROMPT_TOKENS)), params=params) as stream:
        task: asyncio.Future[None] | None = None
        async for update in stream:
            times += [time.perf_counter()] * bool(update.token_ids)
            if len(times) == FIRST_GAPS and load is not None:
                task = asyncio.ensure_future(load())
            if task.done() if task is not None else len(times) == FIRST_GAPS + UNLOADED_GAPS:
                break
        if task is not None:
            await task
    return np.diff(times[FIRST_GAPS - 1 :]).tolist()


def make(folder: Path, layers: dict[str, tuple[int, int]], rank: int, *, seed: int) -> Path:
    """Write a random adapter of all attention and MLP layers, in PEFT's form."""
    rng, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, (outputs, inputs) in layers.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = rng.normal(size=shape, scale=0.01).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    folder.mkdir()
    entries = {name: Entry("F32", values.shape) for name, values in tensors.items()}
    with (folder / "adapter_model.safetensors").open("wb") as file:
        write_safetensors(file, entries, (values.tobytes() for values in tensors.values()))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()

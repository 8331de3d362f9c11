"""What this machine gives at most, and what a server that lost nothing of it would do under a load.

A step reads every weight and what its requests keep, once, and does a multiply-add for each weight and token; it takes
no less time than a plain read of as many bytes, nor than so many of the variant's best instruction (`peaks.cpp`). Left
out, so that a floor is one: attention's own products, activations, the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import Load
from forebay.base.paths import cache_folder
from forebay.base.toolchain import find_compiler
from forebay.base.variants import Variant
from forebay.families.config.model_config import config_from_folder, config_from_gguf
from forebay.formats.gguf import GgufFile

SOURCE = Path(__file__).parent / "peaks.cpp"
# What peaks.cpp measures, and the CPU flag of each: a variant uses those whose flags it needs.
INSTRUCTIONS = {
    "fma": "fma",
    "bytes": "avx2",
    "vnni": "avx_vnni",
    "fma512": "avx512f",
    "bytes512": "avx512bw",
    "vnni512": "avx512_vnni",
    "bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
}
OF_BYTES = frozenset({"bytes", "vnni", "bytes512", "vnni512", "amx_int8"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Bytes read and multiply-adds done a second, of all cores together; `products_by` is the instruction."""

    read: float
    products: float
    products_by: str


def measure_peaks(variant: Variant, num_bytes: int, *, of_bytes: bool = True) -> Peaks:
    """In a second or two. Reads `num_bytes` over and over: what fits in a cache is read from there, as weights are.
    Without `of_bytes` the products of floating-point numbers alone count."""
    names = [
        name for name, flag in INSTRUCTIONS.items() if flag in variant.needs and (of_bytes or name not in OF_BYTES)
    ]
    command = [str(program()), str(len(os.sched_getaffinity(0))), str(num_bytes), *names]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    rates = dict(zip(lines[::2], map(float, lines[1::2]), strict=True))
    read = rates.pop("read")
    best = max(rates, key=rates.__getitem__)
    return Peaks(read=read, products=rates[best], products_by=best)


def program() -> Path:
    """`peaks.cpp`, compiled once. SystemExit where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("floors need a C++ compiler: install g++ 11 or later")
    target = cache_folder("bench") / f"peaks-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-std=c++20", "-O3", "-pthread", str(SOURCE), "-o", str(part)], check=True)
        part.rename(target)
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Of a model: the bytes of its weights as they are held, the multiply-adds of a token in its layers, if it took all
    experts, and in its head, and the bytes that a request keeps, by token and whatever its length. `expert_products`
    are those of `layer_products` in experts, of which a token takes the share `chosen`."""

    weight_bytes: int
    layer_products: int
    head_products: int
    token_bytes: int
    state_bytes: int
    expert_products: int = 0
    chosen: float = 1.0

    def ideal(self, load: Load, peaks: Peaks) -> dict[str, float]:
        """The result of a `forebay bench serve` with nothing lost: prompts of all streams in a step, then their tokens
        step by step. A shared prefix is computed before, and read once for all streams."""
        streams, new = load.concurrency, load.mean_input_len - load.prefix_len
        first = self._seconds(peaks, streams * new, streams, 0)
        kept = load.prefix_len + streams * (new + load.output_len / 2)
        step = self._seconds(peaks, streams, streams, kept)
        duration = first + (load.output_len - 1) * step
        return {
            "output_throughput": streams * load.output_len / duration,
            "total_input_tokens": streams * load.mean_input_len,
            "duration": duration,
            "median_ttft_ms": 1e3 * first,
            "median_tpot_ms": 1e3 * step,
            "p99_itl_ms": 1e3 * self._seconds(peaks, streams + new, streams, kept),
        }

    def _seconds(self, peaks: Peaks, tokens: float, streams: int, kept: float) -> float:
        """Of a step, for `tokens` of `streams` requests that keep `kept` tokens before. Tokens draw their experts at
        random, and what none takes is not read."""
        unread = (1 - self.chosen) ** tokens * self.expert_products / (self.layer_products + self.head_products)
        num_bytes = self.weight_bytes * (1 - unread) + kept * self.token_bytes
        num_bytes += 2 * streams * self.state_bytes  # read and written
        products = tokens * (self.layer_products - (1 - self.chosen) * self.expert_products)
        products += streams * self.head_products
        return max(num_bytes / peaks.read, products / peaks.products)


def _num_bytes(plan: Mapping[str, Any], kind: str) -> int:
    """Return the bytes of a kind of cache for a token or slot; 0 where the model has none."""
    return int(plan["sizes"]["kinds"].get(kind, {}).get("num_bytes", 0))


def work_of(model: Path, flags: Sequence[str], environment: Mapping[str, str]) -> Work:
    """As `forebay plan` says it for a server with these flags and this environment. A model with experts is taken to
    have them in every layer, of three matrices each."""
    command = [str(Path(sys.executable).parent / "forebay"), "plan", "--json", str(model), *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})
    plan = json.loads(done.stdout)
    config = config_from_gguf(GgufFile(model)) if model.suffix == ".gguf" else config_from_folder(model)
    table = config.vocab_size * config.hidden_size
    products = plan["num_parameters"] - (0 if config.tie_word_embeddings else table)
    experts = config.experts
    in_experts = 0 if experts is None else experts.num_experts * 3 * config.hidden_size * experts.intermediate_size
    return Work(
        weight_bytes=round(plan["weight_bytes"] * products / plan["num_parameters"]),
        layer_products=products - table,
        head_products=table,
        token_bytes=plan["sizes"]["kv_bytes_per_token"] + _num_bytes(plan, "window"),
        state_bytes=_num_bytes(plan, "state"),
        expert_products=config.num_layers * in_experts,
        chosen=1.0 if experts is None else experts.per_token / experts.num_experts,
    )

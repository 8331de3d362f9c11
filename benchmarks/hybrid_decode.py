"""Decode tokens per second and memory per request of hybrid models beside transformers, in one run on one machine.

    python benchmarks/hybrid_decode.py                             # both models, contexts 128 and 4,096; minutes
    python benchmarks/hybrid_decode.py --quick --like falcon_h1    # a minute: context 128, fewer steps

Random models of about 100 million weights with the proportions of Falcon-H1-0.5B and Qwen3-Next-80B-A3B, made anew from
a seed; their vocabulary is 8,192, so that it is the layers that are measured. Both sides compute in bfloat16 with all
cores and decode greedily from the same checkpoint: Forebay through its engine, scheduler included, with its defaults,
and transformers, in a process of its own, by bare model steps over its cache, which is quicker than its `generate`.
Each context is computed once; then short runs of decode steps alternate, and each figure is the median of three.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from forebay.base.units import ceil_div, human_bytes

VOCAB = 8192
ROOM = 512  # tokens that a context may grow by
TARGET = 3  # times transformers, with 16 requests at once

_COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 32_768, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        **_COMMON,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1152,
        "mamba_n_heads": 18,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        # transformers' prefill needs memory in proportion to it: with 128, 15 GB for 4,096 tokens. Decoding does not
        # use it.
        "mamba_chunk_size": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **_COMMON,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "intermediate_size": 1280,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one request keeps: of recurrent state, and of KV."""

    state: int
    kv: int


class Forebay:
    """The engine in this process."""

    def __init__(self, path: Path, num_requests: int, context: int) -> None:
        from forebay.config.resolve import resolve
        from forebay.engine.loop.build import build_engine

        config = resolve(
            {
                "model": str(path),
                "dtype": "bfloat16",
                "context_length": context + ROOM,
                "max_running_requests": num_requests,
                "log_level": "warning",
            }
        )
        times = dict.fromkeys(("queue_timeout_s", "request_timeout_s", "stall_timeout_s"), math.inf)
        patient = replace(config.engine, scheduling=replace(config.engine.scheduling, **times))
        self.core, _ = build_engine(patient)
        self._next_id = 1

    def fill(self, num_requests: int, context: int) -> None:
        """Compute the prompts of so many new requests; from then on each step decodes all of them."""
        from forebay.engine.frames import AddRequest
        from forebay.requests.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=ROOM, temperature=0.0, ignore_eos=True)
        rng = np.random.default_rng(self._next_id)
        for prompt in rng.integers(3, VOCAB, (num_requests, context)).tolist():
            refused = self.core.add(AddRequest(request_id=self._next_id, prompt_token_ids=prompt, params=params))
            assert not refused, refused
            self._next_id += 1
        while len(self.core.scheduler.queues.running) < num_requests:
            self._step()
        self._step()

    def decode(self, num_steps: int) -> float:
        """Tokens per second of so many steps."""
        start = time.perf_counter()
        tokens = sum(self._step() for _ in range(num_steps))
        return tokens / (time.perf_counter() - start)

    def _step(self) -> int:
        """How many tokens a step has given."""
        updates = self.core.step()
        assert not any(update.finish for update in updates), f"a request has ended: {updates}"
        return sum(len(update.token_ids) for update in updates)

    def memory(self) -> Memory:
        """Of one request: the state slots that the ledger books for it, live and tracking, and the pages of its row."""
        scheduler, config = self.core.scheduler, self.core.scheduler.config
        batch = scheduler.queues.running
        states = next(kind for kind in scheduler.pools.kinds if kind.name == "state")
        num_slots = len(states.slots.held_by(batch.reqs[0].id))
        num_pages = ceil_div(int(batch.seq_lens_cpu[0]), config.page_size)
        return Memory(num_slots * config.kinds.slot_bytes["state"], num_pages * config.kinds.slot_bytes["kv"])

    def clear(self) -> None:
        for request_id in list(self.core.scheduler.requests):
            self.core.abort(request_id)
        while not self.core.idle:
            self.core.step()
        self.core.scheduler.flush_cache()


class Transformers:
    """transformers in a child process, asked line by line."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def _ask(self, *words: object) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(*words, file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        if not answer:
            raise SystemExit("transformers failed; its message is above")
        return answer

    def fill(self, num_requests: int, context: int) -> None:
        self._ask("fill", num_requests, context)

    def decode(self, num_steps: int) -> float:
        return float(self._ask("decode", num_steps))

    def memory(self) -> Memory:
        return Memory(*map(int, self._ask("memory").split()))


@contextmanager
def transformers(path: Path) -> Iterator[Transformers]:
    command = [sys.executable, __file__, "--serve-transformers", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise SystemExit("transformers did not load the model; its message is above")
        try:
            yield Transformers(child)
        finally:
            child.kill()


def serve_transformers(path: str) -> None:
    """The child: one prompt is computed and its cache repeated for all requests, which decode takes the same time."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    cache: Any = None
    tokens = torch.empty(0)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        with torch.no_grad():
            match command:
                case "fill":
                    num_requests, context = map(int, numbers)
                    cache = None
                    prompt = torch.randint(3, VOCAB, (1, context))
                    output = model(prompt, use_cache=True, logits_to_keep=1)
                    cache = _repeated(output.past_key_values, num_requests)
                    tokens = output.logits[:, -1].argmax(-1, keepdim=True).repeat(num_requests, 1)
                    answer = "done"
                case "decode":
                    start = time.perf_counter()
                    for _ in range(int(numbers[0])):
                        tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, True)
                    answer = str(int(numbers[0]) * len(tokens) / (time.perf_counter() - start))
                case _:
                    kv, state = _bytes_of(cache)
                    answer = f"{state // len(tokens)} {kv // len(tokens)}"
        print(answer, flush=True)


def _tensors(layer: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that one layer of transformers' cache keeps, with the names of its fields."""
    import torch

    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", tensor) for key, tensor in value.items() if isinstance(tensor, torch.Tensor))


def _repeated(cache: Any, n: int) -> Any:
    for layer in cache.layers:
        for name, tensor in _tensors(layer):
            field, _, key = name.partition(".")
            repeated = tensor.repeat_interleave(n, dim=0)
            if key:
                getattr(layer, field)[int(key) if key.isdigit() else key] = repeated
            else:
                setattr(layer, field, repeated)
    return cache


def _bytes_of(cache: Any) -> tuple[int, int]:
    """Of keys and values, and of states."""
    sizes = [(name, tensor.nbytes) for layer in cache.layers for name, tensor in _tensors(layer)]
    kv = sum(size for name, size in sizes if name in ("keys", "values"))
    return kv, sum(size for _, size in sizes) - kv


def make_checkpoint(kind: str, folder: Path) -> int:
    """Write a random model of the kind; how many weights it has."""
    return write_checkpoint({"model_type": kind, **MODELS[kind]}, folder)


def write_checkpoint(config: dict[str, Any], folder: Path) -> int:
    """Write a model with this configuration and random weights in bfloat16; how many weights it has."""
    from forebay.families.config.model_config import config_from_folder
    from forebay.formats.safetensors import SINGLE_NAME
    from forebay.models.random_weights import write_random_weights

    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    return write_random_weights(
        config_from_folder(folder), folder / SINGLE_NAME, dtype="bfloat16", seed=0, progress=lambda done, total: None
    )


def measure(kind: str, args: argparse.Namespace, speeds: Table, memories: Table) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        num_weights = make_checkpoint(kind, path)
        name = f"{kind}-like, {num_weights / 1e6:.0f} M"
        ours = Forebay(path, max(args.concurrency), max(args.context))
        with transformers(path) as theirs:
            for context in args.context:
                for concurrency in args.concurrency:
                    _one_row(name, ours, theirs, context, concurrency, args, speeds)
                    if concurrency == args.concurrency[-1]:
                        own, other = ours.memory(), theirs.memory()
                        sizes = map(human_bytes, (own.state, other.state, own.kv, other.kv))
                        memories.add_row(name, f"{context:,}", *sizes)
                    ours.clear()


def _one_row(
    name: str,
    ours: Forebay,
    theirs: Transformers,
    context: int,
    concurrency: int,
    args: argparse.Namespace,
    speeds: Table,
) -> None:
    for side in (ours, theirs):
        side.fill(concurrency, context)
        side.decode(4)
    a, b = [], []
    for _ in range(args.repeats):
        a.append(ours.decode(args.steps))
        b.append(theirs.decode(args.steps))
        print(f"{name}, {context} x {concurrency}: {a[-1]:.0f} and {b[-1]:.0f} tok/s", file=sys.stderr)
    own, other = statistics.median(a), statistics.median(b)
    missed = " missed" if concurrency == 16 and own < TARGET * other else ""
    speeds.add_row(name, f"{context:,}", str(concurrency), f"{own:.0f}", f"{other:.0f}", f"{own / other:.1f}{missed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="which models")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 4096], help="tokens of each prompt")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="requests at once")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of one run")
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs behind each median")
    parser.add_argument("--quick", action="store_true", help="context 128, 8 steps")
    parser.add_argument("--serve-transformers", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_transformers:
        serve_transformers(args.serve_transformers)
        return
    if args.quick:
        args.context, args.steps = [128], 8
    speeds = Table(
        "model", "context", "at once", "forebay, tok/s", "transformers, tok/s", "ratio", title="decoding, bfloat16"
    )
    memories = Table(
        *("model", "context", "state, forebay", "state, transformers", "KV, forebay", "KV, transformers"),
        title="memory of one request",
    )
    for kind in args.like:
        measure(kind, args, speeds, memories)
    console = Console(width=120)
    console.print(speeds)
    console.print(memories)


if __name__ == "__main__":
    main()

"""What quantized weights cost in quality: perplexity on a fixed text, as served and in float32.

    python benchmarks/perplexity.py                                 # the default model, a minute or two
    python benchmarks/perplexity.py --quantization file int8 int4 --window 1024
    python benchmarks/perplexity.py --transformers                  # and by transformers in float32
    python benchmarks/perplexity.py --kernels avx512vnni --dtype float32 --activation-bits 8

The reference has the file's weights dequantized and computes in float32 by the torch ops. As served is what the server
does on this machine: its kernels, with activations and KV in --dtype. The change is of the perplexity, with its
standard error over the text's tokens; the two see the same tokens.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from forebay import models
from forebay.backends import make_ops
from forebay.base.units import human_bytes
from forebay.config.engine_config import CacheTypes
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.formats.store import find_model
from forebay.layers.context import ForwardContext
from forebay.layers.states import States
from forebay.models import Model
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool
from forebay.text.tokenizer import Tokenizer

PROSE = Path(__file__).parent / "data" / "prose.txt"
WINDOW = 512
LIMIT = 0.005  # of the float32 reference: the target
_PAGE = 16

Logits = Callable[[Sequence[int]], Tensor]
"""Tokens of one window -> [tokens, V] float32."""


class Change(NamedTuple):
    """Of a perplexity, as a part of the reference's: 0.01 for one per cent more; and its standard error."""

    value: float
    error: float


def prose_tokens(path: Path) -> list[int]:
    """The text in the tokens of a checkpoint; its first line says where it is from."""
    _, _, text = PROSE.read_text(encoding="utf-8").partition("\n")
    return Tokenizer.from_path(path).encode(text, add_special_tokens=False)


def losses(logits: Logits, ids: Sequence[int], window: int = WINDOW) -> Tensor:
    """Nats for each token but the first of every window, float64."""
    parts = []
    for first in range(0, len(ids), window):
        of_window = list(ids[first : first + window])
        log_likelihoods = logits(of_window)[:-1].double().log_softmax(dim=-1)
        parts.append(-log_likelihoods.gather(1, torch.tensor(of_window[1:]).unsqueeze(1)).squeeze(1))
    return torch.cat(parts)


def change(found: Tensor, reference: Tensor) -> Change:
    more = found - reference
    return Change(math.expm1(float(more.mean())), float(more.std()) / math.sqrt(len(more)))


def model_logits(model: Model, dtype: torch.dtype) -> Logits:
    """One window at a time, in one step, each with caches of its own."""

    def logits(ids: Sequence[int]) -> Tensor:
        ctx = _context(model, len(ids), dtype)
        return model.logits(model.forward(ctx, torch.tensor(ids)))

    return logits


def _context(model: Model, length: int, dtype: torch.dtype) -> ForwardContext:
    """A single sequence of `length` tokens in pages 1, 2, 3.. and state slot 1."""
    num_pages, name = -(-length // _PAGE), str(dtype).removeprefix("torch.")
    cache = CachePool(
        model.cache_specs(),
        CacheTypes(dtype=name, kv_cache_dtype=name),
        page_size=_PAGE,
        num_slots={"kv": num_pages, "window": num_pages, "state": 1},
        device="cpu",
    )
    row, ends = torch.tensor([1], dtype=torch.int32), torch.tensor([0, length], dtype=torch.int32)
    table = torch.stack([torch.zeros(num_pages), 1 + torch.arange(num_pages)]).int()
    none = torch.empty(0, dtype=torch.int32)
    paged = PagedKv(
        page_table=table,
        rows=row,
        q_start=ends,
        seq_lens=torch.tensor([length], dtype=torch.int32),
        page_size=_PAGE,
        out_cache_loc=_PAGE + torch.arange(length),
    )
    no_snapshots = {"snap_start": torch.zeros(2, dtype=torch.int32), "snap_ends": none, "snap_slots": none}
    own = {"q_start": ends, "q_stop": ends[1:], "positions": torch.arange(length)}
    states = States(StateBatch(slots=row, write_slots=row, **own, **no_snapshots))
    kinds = {"kv": paged, "window": paged, "state": states}
    return ForwardContext(positions=torch.arange(length), kinds=kinds, cache=cache)


def loaded(checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, quantization: Quantization) -> Model:
    return models.load(checkpoint, ops=ops, dtype=dtype, quantization=quantization)


def transformers_logits(path: Path) -> Logits:
    """From transformers' own reading of a GGUF file, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)

    def logits(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(torch.tensor([list(ids)])).logits[0]
        return found

    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's path or name; the default model if left out")
    parser.add_argument(
        "--quantization", nargs="+", choices=list(Quantization), default=[Quantization.NONE, Quantization.FILE]
    )
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens that are scored together")
    parser.add_argument("--kernels", default="native", help="native, or an instruction set of this CPU")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--activation-bits", type=int, choices=[8, 16], default=16)
    parser.add_argument("--transformers", action="store_true", help="compute the reference by transformers, too")
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    path = find_model(args.model)
    checkpoint, ids = open_checkpoint(path), prose_tokens(path)
    torch_ops, ops = make_ops("torch", threads), make_ops(args.kernels, threads, args.activation_bits)
    table = Table(
        "weights", "computed by", "bytes", "perplexity", "change", "s", title=f"{path.stem}, {len(ids)} tokens"
    )

    def add(name: str, by: str, num_bytes: str, logits: Logits, reference: Tensor | None) -> Tensor:
        started = time.perf_counter()
        found = losses(logits, ids, args.window)
        more = None if reference is None else change(found, reference)
        shown = "" if more is None else f"{more.value:+.3%} ± {more.error:.3%}"
        elapsed = f"{time.perf_counter() - started:.0f}"
        table.add_row(name, by, num_bytes, f"{math.exp(float(found.mean())):.4f}", shown, elapsed)
        return found

    def row(by: Ops, dtype: torch.dtype, quantization: Quantization, reference: Tensor | None = None) -> Tensor:
        model = loaded(checkpoint, by, dtype, quantization)
        name = str(dtype).removeprefix("torch.") if quantization is Quantization.NONE else str(quantization)
        return add(name, by.name, human_bytes(model.weight_bytes), model_logits(model, dtype), reference)

    reference = row(torch_ops, torch.float32, Quantization.NONE)
    if args.transformers:
        add("float32", "transformers", "", transformers_logits(path), reference)
    for quantization in args.quantization:
        row(ops, getattr(torch, args.dtype), Quantization(quantization), reference)
    Console().print(table)


if __name__ == "__main__":
    main()

"""Decode steps of a model like DeepSeek-V3.2 beside one like V3, whose attention reads all tokens, in one run.

    python -m benchmarks.sparse_attention                                  # minutes; 32k tokens of 16 requests: 11 GB
    python -m benchmarks.sparse_attention --contexts 32768 --streams 1
    python -m benchmarks.sparse_attention --tiny                           # seconds: that this program works

Random models of about 100 million weights, equal but for the indexers, with attention's published sizes (latent vectors
of 512 + 64, index keys of 128, 2,048 selected tokens) and few heads. The caches hold random numbers instead of computed
prompts, each request has pages of its own, and steps of both models alternate; a figure is the median. Steps run the
model's Python, not a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from forebay import models
from forebay.backends import make_ops
from forebay.base.units import human_bytes
from forebay.config.engine_config import CacheTypes
from forebay.families.checkpoint import open_checkpoint
from forebay.families.model_config import config_from_folder
from forebay.layers.context import ForwardContext
from forebay.models.random_weights import write_random_weights
from forebay.ops import Ops
from forebay.ops.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import cache_sizes

DENSE, SPARSE = "deepseek_v3", "deepseek_v32"
PAGE_SIZE: Final = 16
VOCAB: Final = 8192
FIELDS: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 65_536,
}
INDEXER: Final[dict[str, Any]] = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 2048}
TINY: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


class Decoding:
    """A model, and requests of `context` tokens each on pages of their own."""

    def __init__(self, kind: str, folder: Path, ops: Ops, streams: int, context: int) -> None:
        self.model = models.load(open_checkpoint(folder / kind), ops=ops, dtype=torch.float32)
        specs, types = self.model.cache_specs(), CacheTypes(kv_cache_dtype="bfloat16")
        self.bytes_per_token = cache_sizes(specs, types).kv_bytes_per_token
        pages = streams * -(-context // PAGE_SIZE)
        self.cache = CachePool(specs, types, page_size=PAGE_SIZE, num_slots={"kv": pages}, device="cpu")
        for tensor in self.cache.tables["kv"].tensors:
            tensor.normal_()
        self._table = torch.zeros(streams + 1, pages // streams, dtype=torch.int32)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1
        self._table[1:] = order.view(streams, -1)
        self._streams, self._context = streams, context

    def step(self) -> float:
        """Decode one token of each request; its seconds."""
        rows = torch.arange(1, self._streams + 1, dtype=torch.int32)
        last = self._table[1:, -1].long() * PAGE_SIZE + (self._context - 1) % PAGE_SIZE
        pages = PagedKv(
            page_table=self._table,
            rows=rows,
            q_start=torch.arange(self._streams + 1, dtype=torch.int32),
            seq_lens=torch.full((self._streams,), self._context, dtype=torch.int32),
            page_size=PAGE_SIZE,
            out_cache_loc=last,
        )
        positions = torch.full((self._streams,), self._context - 1)
        start = time.perf_counter()
        with torch.inference_mode():
            ctx = ForwardContext(positions=positions, kinds={"kv": pages}, cache=self.cache)
            self.model.logits(self.model.forward(ctx, rows.long()))
        return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=9, help="steps of each model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small models and contexts")
    args = parser.parse_args()
    if args.tiny:
        args.contexts, args.streams, args.repeats = [32, 64], [2], 2
    ops = make_ops("native", args.threads)
    table = Table(
        "tokens", "streams", "dense, tok/s", "sparse, tok/s", "ratio", "dense, a request", "sparse, a request"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in (DENSE, SPARSE):
            _write(folder / kind, kind, tiny=args.tiny)
        for context in args.contexts:
            for streams in args.streams:
                table.add_row(*_measured(folder, ops, streams, context, args.repeats))
    Console().print(f"{ops.name}, {args.threads} threads, caches in bfloat16", table)


def _write(folder: Path, kind: str, *, tiny: bool) -> None:
    folder.mkdir()
    fields = {**FIELDS, **(INDEXER if kind == SPARSE else {}), **(TINY if tiny else {}), "model_type": kind}
    if tiny and kind == SPARSE:
        fields["index_topk"] = 16
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "float32"}))
    path = folder / "model.safetensors"
    write_random_weights(config_from_folder(folder), path, dtype="float32", seed=0, progress=lambda *_: None)


def _measured(folder: Path, ops: Ops, streams: int, context: int, repeats: int) -> list[str]:
    both = [Decoding(kind, folder, ops, streams, context) for kind in (DENSE, SPARSE)]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for taken, decoding in zip(seconds, both, strict=True):
            taken.append(decoding.step())
    dense, sparse = (statistics.median(taken[1:]) for taken in seconds)
    ratio = statistics.median(a / b for a, b in list(zip(*seconds, strict=True))[1:])
    sizes = [human_bytes(decoding.bytes_per_token * context) for decoding in both]
    return [f"{context:,}", str(streams), f"{streams / dense:.1f}", f"{streams / sparse:.1f}", f"{ratio:.2f}x", *sizes]


if __name__ == "__main__":
    main()

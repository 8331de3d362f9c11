"""Decode steps of a model like DeepSeek-V3.2 beside one like V3, whose attention reads all tokens, in one run; and with
the KV in two tiers (HiSparse), the host tier in memory and in a file.

    python -m benchmarks.sparse_attention                                  # minutes; 32k tokens of 16 requests: 24 GB
    python -m benchmarks.sparse_attention --contexts 32768 --streams 1
    python -m benchmarks.sparse_attention --tiny                           # seconds: that this program works

Random models of about 100 million weights, equal but for the indexers, with attention's published sizes (latent vectors
of 512 + 64, index keys of 128, 2,048 selected tokens, hot buffers of 4,096) and few heads. The caches hold random
numbers instead of computed prompts, each request has pages of its own, and steps of all models alternate. Each step
decodes the next position of every request, always the same token, so that a request selects much of what it selected
before: the hit rate is in the table. A figure is the median. Steps run the model's Python, not a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from forebay import models
from forebay.backends import make_ops
from forebay.base.units import human_bytes
from forebay.config.engine_config import NO_HISPARSE, CacheTypes, HisparseOptions
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.layers.context import ForwardContext
from forebay.memory.kinds.resident.declaration import hot_row_bytes
from forebay.memory.kinds.resident.residents import RESIDENT
from forebay.models.random_weights import write_random_weights
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import cache_sizes
from forebay.pools.regions import Regions, Tag
from forebay.pools.tiers import HotSizes
from forebay.runtime.kinds.resident import HisparseCoordinator

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
TINY_TOP_K: Final = 16
WARM_UP_STEPS: Final = 3  # which fill hot buffers, and code and buffers of the process
TINY: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


class Shape(NamedTuple):
    """Requests that decode: their number, the tokens that each has after the last step, and the steps."""

    streams: int
    context: int
    num_steps: int


class Decoding:
    """A model, and requests on pages of their own."""

    def __init__(
        self, kind: str, folder: Path, ops: Ops, shape: Shape, hisparse: HisparseOptions = NO_HISPARSE
    ) -> None:
        streams, context, num_steps = shape
        self.model = models.load(open_checkpoint(folder / kind), ops=ops, dtype=torch.float32)
        specs = self.model.cache_specs()
        types = CacheTypes(kv_cache_dtype="bfloat16", sparse_kv_on_host=hisparse.enabled)
        per_row = -(-context // PAGE_SIZE)
        self.cache = CachePool(
            specs,
            types,
            page_size=PAGE_SIZE,
            num_slots={"kv": streams * per_row, RESIDENT: 1},
            device="cpu",
            hot=HotSizes(streams + 1, hisparse.device_buffer_size),
            take_tiers=partial(Regions().take_tiers, Tag.KV_CACHE, folder=hisparse.host_path),
        )
        for tensor in self.cache.tables["kv"].tensors:
            for page in tensor.split(1 << 12):
                page.normal_()
        self._table = torch.zeros(streams + 1, per_row, dtype=torch.int32)
        order = torch.randperm(streams * per_row, generator=torch.Generator().manual_seed(0)) + 1
        self._table[1:] = order.view(streams, -1)
        self._streams, self._next = streams, context - num_steps
        sizes, self.coordinator = cache_sizes(specs, types), None
        resident = sizes.kinds.get(RESIDENT)
        on_device = sizes.kv_bytes_per_token - (resident.num_bytes if resident else 0)
        self.device_bytes = on_device * context
        if resident:
            self.device_bytes += hot_row_bytes(hisparse.device_buffer_size, PAGE_SIZE, resident)
            self.coordinator = HisparseCoordinator(self.cache, ops, torch.zeros(1, dtype=torch.int32))
            rows = torch.arange(1, streams + 1)
            self.coordinator.change({"admit_rows": rows, "hot_rows": rows})

    def step(self) -> float:
        """Decode one token of each request; its seconds."""
        rows, at = torch.arange(1, self._streams + 1, dtype=torch.int32), self._next
        self._next += 1
        pages = PagedKv(
            page_table=self._table,
            rows=rows,
            q_start=torch.arange(self._streams + 1, dtype=torch.int32),
            seq_lens=torch.full((self._streams,), at + 1, dtype=torch.int32),
            page_size=PAGE_SIZE,
            out_cache_loc=self._table[1:, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE,
        )
        positions = torch.full((self._streams,), at)
        start = time.perf_counter()
        with torch.inference_mode():
            kinds: dict[str, Any] = {"kv": pages}
            if self.coordinator is not None:
                kinds[RESIDENT] = self.coordinator.layer_input(pages, positions)
            ctx = ForwardContext(positions=positions, kinds=kinds, cache=self.cache)
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
    top_k = TINY_TOP_K if args.tiny else INDEXER["index_topk"]
    ops = make_ops("native", args.threads)
    rates = ("dense, tok/s", "sparse", "two tiers", "in a file")
    ratios = ("sparse by dense", "tiers by sparse", "file by sparse")
    table = Table("tokens", "streams", *rates, *ratios, "device, a request: dense", "sparse", "two tiers", "hit rate")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in (DENSE, SPARSE):
            _write(folder / kind, kind, tiny=args.tiny)
        for context in args.contexts:
            for streams in args.streams:
                table.add_row(*_measured(folder, ops, streams, context, args.repeats, top_k))
    Console(width=160).print(f"{ops.name}, {args.threads} threads, caches in bfloat16", table)


def _write(folder: Path, kind: str, *, tiny: bool) -> None:
    folder.mkdir()
    fields = {**FIELDS, **(INDEXER if kind == SPARSE else {}), **(TINY if tiny else {}), "model_type": kind}
    if tiny and kind == SPARSE:
        fields["index_topk"] = TINY_TOP_K
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "float32"}))
    path = folder / "model.safetensors"
    write_random_weights(config_from_folder(folder), path, dtype="float32", seed=0, progress=lambda *_: None)


def _measured(folder: Path, ops: Ops, streams: int, context: int, repeats: int, top_k: int) -> list[str]:
    tiers = HisparseOptions(device_buffer_size=2 * top_k, top_k=top_k)
    options = NO_HISPARSE, NO_HISPARSE, tiers, replace(tiers, host_path=str(folder))
    kinds, shape = (DENSE, SPARSE, SPARSE, SPARSE), Shape(streams, context, repeats + WARM_UP_STEPS)
    decodings = [Decoding(kind, folder, ops, shape, option) for kind, option in zip(kinds, options, strict=True)]
    seconds: list[list[float]] = [[] for _ in decodings]
    counts = torch.zeros(2, dtype=torch.int64)
    for repeat in range(repeats + WARM_UP_STEPS):
        for taken, decoding in zip(seconds, decodings, strict=True):
            taken.append(decoding.step())
        if repeat == WARM_UP_STEPS - 1 and (coordinator := decodings[2].coordinator):
            counts = coordinator.counts.clone()
    kept = [taken[WARM_UP_STEPS:] for taken in seconds]

    def ratio(one: int, other: int) -> str:
        return f"{statistics.median(b / a for a, b in zip(kept[one], kept[other], strict=True)):.2f}x"

    assert decodings[2].coordinator is not None
    read, loaded = (decodings[2].coordinator.counts - counts).tolist()
    return [
        f"{context:,}",
        str(streams),
        *(f"{streams / statistics.median(taken):.1f}" for taken in kept),
        *(ratio(1, 0), ratio(2, 1), ratio(3, 1)),
        *(human_bytes(decoding.device_bytes) for decoding in decodings[:3]),
        f"{1 - loaded / read:.1%}",
    ]


if __name__ == "__main__":
    main()

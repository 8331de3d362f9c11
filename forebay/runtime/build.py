"""A model runner and the pools it runs on."""

from __future__ import annotations

import torch

from forebay.base.errors import ModelError
from forebay.base.units import ceil_div
from forebay.models.model import Model
from forebay.ops import Ops
from forebay.pools.kv_pool import KvPool
from forebay.pools.request_rows import RequestRows
from forebay.runtime.model_runner import ModelRunner


def build_runner(
    model: Model,
    *,
    ops: Ops,
    num_pages: int,
    page_size: int,
    max_running_requests: int,
    context_length: int,
    max_num_tokens: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> ModelRunner:
    """Allocate the pools that `memory.budget` sized, and a runner over them.

    `max_num_tokens` is the most tokens of one step. Raises ModelError for layers whose KV shapes differ. Sets torch's
    threads for the whole process: one beside the native ops, whose own threads would otherwise compete with torch's for
    the cores.
    """
    torch.set_num_threads(ops.num_threads if ops.name == "torch" else 1)
    specs = model.cache_specs()
    shapes = sorted({(spec.num_kv_heads, spec.head_dim) for spec in specs})
    if len(shapes) != 1:
        raise ModelError(
            f"the {len(specs)} layers have {len(shapes)} KV shapes (heads, head size): {shapes}; the KV cache has one "
            "for all of them: use a model whose layers agree"
        )
    num_kv_heads, head_dim = shapes[0]
    kv = KvPool(
        num_layers=len(specs),
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    rows = RequestRows(max_running_requests, ceil_div(context_length, page_size), device=device)
    return ModelRunner(model, ops, kv=kv, rows=rows, vocab_size=vocab_size, max_num_tokens=max_num_tokens)

"""Drives a Model without an engine: hands out pages, builds contexts, returns logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.layers.context import ForwardContext
from forebay.models import Model
from forebay.pools.kv_pool import KvPool

NUM_ROWS = 6


class Driver:
    """Rows 1..NUM_ROWS of `context` tokens each, over pages dealt out in a seeded shuffle; unwritten KV is NaN."""

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 4,
        context: int = 64,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.page_size = page_size
        columns = -(-context // page_size)
        num_pages = NUM_ROWS * columns
        spec = model.cache_specs()[0]
        self.kv = KvPool(
            num_layers=len(model.cache_specs()),
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device="cpu",
        )
        for layer in range(len(model.cache_specs())):
            self.kv.k(layer).fill_(float("nan"))
            self.kv.v(layer).fill_(float("nan"))
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)) + 1
        self.page_table = torch.zeros(NUM_ROWS + 1, columns, dtype=torch.int32)
        self.page_table[1:] = order.view(NUM_ROWS, columns)
        self.lens = [0] * (NUM_ROWS + 1)

    def step(self, batch: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """One forward of (row, its next tokens) pairs; the logits of each pair's tokens, [tokens, V]."""
        tokens = [token for _, ids in batch for token in ids]
        counts = [len(ids) for _, ids in batch]
        positions = torch.cat([torch.arange(self.lens[row], self.lens[row] + len(ids)) for row, ids in batch])
        rows = torch.tensor([row for row, _ in batch], dtype=torch.int32)
        owner = rows.long().repeat_interleave(torch.tensor(counts))
        pages = self.page_table[owner, positions // self.page_size].long()
        for row, ids in batch:
            self.lens[row] += len(ids)
        seq_lens = [self.lens[row] for row, _ in batch]
        ctx = ForwardContext(
            positions=positions,
            out_cache_loc=pages * self.page_size + positions % self.page_size,
            rows=rows,
            q_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            page_table=self.page_table,
            page_size=self.page_size,
            max_seq_len=max(seq_lens),
            kv=self.kv,
        )
        hidden = self.model.forward(ctx, torch.tensor(tokens, dtype=torch.int64))
        return list(self.model.logits(hidden).split(counts))

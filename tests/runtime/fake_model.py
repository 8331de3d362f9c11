"""A model of one layer small enough to reason about: each token's hidden state is a mix of the KV that its row's pages
hold, so that whatever goes wrong with pages, rows or positions changes its logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.backends import make_ops
from forebay.config.engine_config import CacheTypes
from forebay.layers.context import ForwardContext
from forebay.memory.budget import PoolSizes
from forebay.ops import Ops
from forebay.pools.cache_spec import CacheSpec, FullAttention
from forebay.runtime import ModelRunner, build_runner
from tests.kernels import NATIVE
from tests.runtime.plans import Planner

VOCAB, HIDDEN, PAGE_SIZE, NUM_ROWS, PAGES_PER_ROW = 61, 8, 4, 6, 8
CONTEXT = PAGE_SIZE * PAGES_PER_ROW


class FakeModel:
    """Reads KV through the page table, a position at a time and with no arithmetic across tokens: a token's logits have
    the same bits however its prompt is cut and whoever is beside it. `poison` maps a token id to what its logits are.
    """

    weight_bytes = 0
    adapters = None
    mrope = False
    generates = True

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._head = torch.randn(HIDDEN, VOCAB, generator=generator) * 2
        self.poison: dict[int, float] = {}

    def cache_specs(self) -> Sequence[CacheSpec]:
        return (FullAttention(num_kv_heads=1, head_dim=HIDDEN),)

    def forward(self, ctx: ForwardContext, input_ids: Tensor) -> Tensor:
        """[T, HIDDEN + 1]; the last column carries the poison of the token there."""
        x = self._embedding.index_select(0, input_ids)
        ctx.cache.kv(0).k.index_copy_(0, ctx.full.out_cache_loc, x.unsqueeze(1))
        ctx.cache.kv(0).v.index_copy_(0, ctx.full.out_cache_loc, -x.unsqueeze(1))
        tokens = torch.arange(len(input_ids), dtype=torch.int32)
        rows = ctx.full.rows.index_select(0, torch.searchsorted(ctx.full.q_start, tokens, right=True) - 1)
        at, page_size = torch.arange(CONTEXT), ctx.full.page_size
        pages = ctx.full.page_table.index_select(0, rows).index_select(1, at // page_size)
        slots = pages.long() * page_size + at % page_size
        keys = ctx.cache.kv(0).k.index_select(0, slots.flatten()).view(len(x), CONTEXT, HIDDEN)
        terms = torch.sin(keys * (at + 1).unsqueeze(1))
        seen = (at <= ctx.positions.unsqueeze(1)).unsqueeze(2)
        mixed = torch.zeros_like(x)
        for term, is_seen in zip(terms.unbind(1), seen.unbind(1), strict=True):
            mixed = torch.where(is_seen, mixed * 0.5 + term, mixed)
        poison = torch.zeros(len(x), 1)
        for token, value in self.poison.items():
            poison = torch.where((input_ids == token).unsqueeze(1), value, poison)
        return torch.cat([mixed, poison], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        total = torch.zeros(len(hidden), VOCAB)
        for i in range(HIDDEN):
            total = total + hidden[:, i : i + 1] * self._head[i]
        total[:, -2:] -= 1000.0  # never sampled: what tests poison comes from prompts alone
        total[:, 7] += hidden[:, HIDDEN]  # one entry of the row is enough to make it not finite
        return total


@functools.cache
def best_ops() -> Ops:
    """The native ops of all runners that are given none."""
    return make_ops(NATIVE, 2)


def fake_runner(model: FakeModel | None = None, *, ops: Ops | None = None, width: int = 1) -> ModelRunner:
    return build_runner(
        model or FakeModel(),
        sizes=PoolSizes(
            num_slots={"kv": NUM_ROWS * PAGES_PER_ROW},
            page_size=PAGE_SIZE,
            max_running_requests=NUM_ROWS,
            context_length=CONTEXT,
        ),
        ops=ops or best_ops(),
        max_num_tokens=64,
        width=width,
        vocab_size=VOCAB,
        types=CacheTypes(),
        device="cpu",
    )


def planner(runner: ModelRunner, *, seed: int = 0) -> Planner:
    return Planner(runner, page_size=PAGE_SIZE, num_rows=NUM_ROWS, pages_per_row=PAGES_PER_ROW, seed=seed)

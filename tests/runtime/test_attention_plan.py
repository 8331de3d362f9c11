"""Who reads which keys is worked out once a step for all layers that find their KV alike, and anew by each replay."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.pools.cache_spec import FullAttention, IndexKeys, LatentAttention, SharedWindow, SlidingWindow
from forebay.pools.regions import Regions
from forebay.runtime.graphs.backends import CpuGraphs
from tests.models.drive import Driver
from tests.models.tiny import CASES, by_tier, shared_tiny
from tests.ops.helpers import normal

LAYERS, ROWS, PAGES, PAGE_SIZE, WINDOW = 3, 4, 40, 16, 70


@pytest.mark.parametrize("case", by_tier(CASES))
def test_a_step_of_any_model_has_one_plan_for_each_page_map(case: str, native_ops: NativeOps) -> None:
    model = models.load(open_checkpoint(shared_tiny(case).path), ops=native_ops, dtype=torch.float32)
    kinds = [type(spec) for spec in model.cache_specs()]
    driver = Driver(model)
    for batch in ([(1, [5, 6, 7]), (2, [8])], [(1, [9]), (2, [10])]):
        ctx, ids = driver.inputs(batch)
        assert (len(ctx.full.plans), len(ctx.pages("window").plans)) == (0, 0)
        model.forward(ctx, ids)
        selects = IndexKeys in kinds  # then each indexer's selection is planned by itself
        assert len(ctx.full.plans) == (FullAttention in kinds or (LatentAttention in kinds and not selects))
        assert len(ctx.pages("window").plans) == (SlidingWindow in kinds or SharedWindow in kinds)


class Outputs(NamedTuple):
    last: Tensor


class Step:
    """Decodes ROWS sequences through layers that keep all and layers with a window, in turn."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        slots = (ROWS * PAGES + 1) * PAGE_SIZE
        self._caches = [
            KvCache(*(normal((slots, 2, 16), torch.float32, 2 * i + side) for side in (0, 1)))
            for i in range(2 * LAYERS)
        ]
        order = torch.randperm(ROWS * PAGES, generator=torch.Generator().manual_seed(1)) + 1
        self.table = torch.zeros(ROWS + 1, PAGES, dtype=torch.int32)
        self.table[1:] = order.view(ROWS, PAGES)
        self.table[2, : PAGES // 2] = self.table[1, : PAGES // 2]  # a prefix that is read once for both
        self._map = torch.arange(ROWS * PAGES + 1, dtype=torch.int32).flip(0)
        self.seq_lens = torch.ones(ROWS, dtype=torch.int32)
        self.q = normal((ROWS, 4, 16), torch.float32, 9)
        self._rows, self._q_start = torch.arange(1, ROWS + 1).int(), torch.arange(ROWS + 1).int()

    def _paged(self, page_map: Tensor | None) -> PagedKv:
        return PagedKv(
            page_table=self.table,
            rows=self._rows,
            q_start=self._q_start,
            seq_lens=self.seq_lens,
            page_size=PAGE_SIZE,
            out_cache_loc=torch.empty(0, dtype=torch.int64),
            page_map=page_map,
        )

    def __call__(self) -> Outputs:
        full, window, x = self._paged(None), self._paged(self._map), self.q
        for i, cache in enumerate(self._caches):
            paged, size = (window, WINDOW) if i % 2 else (full, 0)
            x = self._ops.attention.paged_attention(x, cache, paged, scale=0.25, sliding_window=size)
        return Outputs(x)


def test_a_replay_plans_anew_once_for_each_page_map(native_ops: NativeOps) -> None:
    """Lengths change from replay to replay, and with them blocks, segments and what is worth sharing."""
    step = Step(native_ops)
    graph = CpuGraphs(native_ops, Regions()).capture(step)
    assert graph.num_kernels == 2 * LAYERS + 2
    for lens in ([1, 1, 1, 1], [400, 350, 30, 1], [640, 640, 5, 600], [63, 64, 65, 128], [2, 3, 513, 512]):
        step.seq_lens.copy_(torch.tensor(lens))
        assert torch.equal(graph().last, step().last)

"""Padded replays of steps with state rings and entries change nothing that is nobody's (C13, C14, C24)."""

from __future__ import annotations

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.ops.native.ops import NativeOps
from forebay.pools.regions import Regions
from forebay.runtime.graphs.backends import CpuGraphs
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import CONTEXT, NUM_ROWS
from tests.runtime.graph_steps import poison

PROMPT, PADDED = 5, 4
REPLAYS = [400, pytest.param(5000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("replays", REPLAYS)
def test_row_0_page_0_and_ring_0_are_as_before_after_many_padded_replays(native_ops: NativeOps, replays: int) -> None:
    model = models.load(
        open_checkpoint(shared_tiny("deepseek_v4-short-blocks").path), ops=native_ops, dtype=torch.float32
    )
    sizes = [NUM_ROWS + PADDED]
    runner = hybrid_runner(
        model, vocab_size=VOCAB, ops=native_ops, graphs=CpuGraphs(native_ops, Regions()), graph_sizes=sizes
    )
    plans, prompt, done, said = HybridPlanner(runner), random_ids(PROMPT, seed=1), 0, set()
    while done < replays:
        row = 1 + done % NUM_ROWS
        plans.begin(row, prompt)
        tokens = [*plans.step(extends=[(row, PROMPT)]).token_ids]
        for _ in range(CONTEXT - PROMPT):
            poison(runner.decode.captured._inputs)
            tokens += plans.step(decodes=[row]).token_ids
            done += 1
        plans.leave(row)
        said.add(tuple(tokens))
    assert len(said) == 1, "every row, however often used, says the same"
    assert not runner.rows.req_to_token[PAD].any()
    assert int(runner.rows.kv_lens[PAD]) <= 1, "the padding row has come further by more than the last replay"
    for kind in ("kv", "window", "ring"):
        for tensor in runner.cache.tables[kind].tensors:
            assert tensor[PAD].isfinite().all(), kind
    for name, tensor in runner.cache.tables["ring"]._tensors.items():
        assert not tensor[PAD].any(), f"{name}: the padding ring is not written"

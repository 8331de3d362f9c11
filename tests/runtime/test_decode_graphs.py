"""Decoding any model type in padded graphs gives the bits that its Python gives without a padded row (C14, C15)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.formats.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.runtime.graph_backends import CpuGraphs, Eager
from tests.models.tiny import CASES, VOCAB, make_tiny, random_ids
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import NUM_ROWS, PAGE_SIZE
from tests.runtime.graph_steps import poison

STEPS = 12


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda case: make_tiny(case, tmp_path_factory.mktemp("tiny")).path


def entries(plans: HybridPlanner, seed: int) -> list[object]:
    """What rows of a batch that grows and shrinks sample, log-probabilities included."""
    rng, rows = random.Random(seed), list(range(1, NUM_ROWS + 1))
    for row in rows:
        plans.begin(row, random_ids(3 + row, seed=row))
    sampled: list[object] = [plans.step(extends=[(row, 3 + row) for row in rows])]
    for _ in range(STEPS):
        poison(plans.runner.decode._inputs)
        decodes = rng.sample(rows, rng.randint(1, len(rows)))
        result = plans.step(decodes=decodes)
        sampled.append((result.token_ids, result.logprobs))
    return sampled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_padded_replays_give_the_bits_of_the_bare_step(case, dtype, native_ops, paths):
    model = models.load(open_checkpoint(paths(case)), ops=native_ops, dtype=dtype)

    def planner(backend: CpuGraphs | Eager, sizes: list[int]) -> HybridPlanner:
        runner = hybrid_runner(model, vocab_size=VOCAB, dtype=dtype, ops=native_ops, graphs=backend, graph_sizes=sizes)
        return HybridPlanner(runner)

    graphed = planner(CpuGraphs(native_ops), [2, 5, NUM_ROWS + 2])
    assert entries(graphed, seed=4) == entries(planner(Eager(), list(range(1, NUM_ROWS + 1))), seed=4)
    cache, rows = graphed.runner.cache, graphed.runner.rows
    assert not rows.req_to_token[PAD].any()
    assert all(tensor[:PAGE_SIZE].isfinite().all() for tensor in cache.kv_tensors())
    assert not any(tensor[PAD].any() for tensor in cache.state_tensors()), "slot 0 is never written"

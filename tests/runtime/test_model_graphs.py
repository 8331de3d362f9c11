"""Steps of any model type in padded graphs give the bits that its Python gives without a padded row (C14, C15)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.memory.slots import PAD
from forebay.pools.regions import Regions
from forebay.requests.step_plan import StepResult
from forebay.runtime.graphs.backends import CpuGraphs, Eager
from tests.models.tiny import CASE_OF, CASES, VOCAB, page_size_of, random_ids, shared_tiny
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import NUM_ROWS, PAGE_SIZE
from tests.runtime.graph_steps import poison

ROUNDS, STEPS = 3, 5

# The long tier has every case in both.
FITTING = [case for case in CASES if page_size_of(case, PAGE_SIZE) == PAGE_SIZE]
IN_FLOAT32 = [pytest.param(case, torch.float32, id=f"{case}-float32") for case in FITTING]
IN_BFLOAT16 = [
    pytest.param(case, torch.bfloat16, id=f"{case}-bfloat16") for case in CASE_OF.values() if case in FITTING
]
IN_BFLOAT16 += [
    pytest.param(case, torch.bfloat16, id=f"{case}-bfloat16", marks=pytest.mark.slow)
    for case in FITTING
    if case not in CASE_OF.values()
]


@pytest.fixture(scope="module")
def paths() -> Callable[[str], Path]:
    return lambda case: shared_tiny(case).path


def entries(plans: HybridPlanner, seed: int) -> list[object]:
    """What rows of a batch that grows and shrinks sample, log-probabilities included: prompts alone and beside decodes,
    of lengths that come again and again, then decodes."""
    rng, rows = random.Random(seed), list(range(1, NUM_ROWS + 1))
    sampled: list[StepResult] = []
    for _ in range(ROUNDS):
        for row in rows:
            plans.begin(row, random_ids(3 + row, seed=row))
        sampled.append(plans.step(extends=[(row, 3 + row) for row in rows[:3]]))
        sampled.append(plans.step(extends=[(row, 3) for row in rows[3:]], decodes=rows[:3]))
        sampled.append(plans.step(extends=[(row, row) for row in rows[3:]], decodes=rows[:3]))
        for _ in range(STEPS):
            poison(plans.runner.decode.captured._inputs)
            sampled.append(plans.step(decodes=rng.sample(rows, rng.randint(1, len(rows)))))
        for row in rows:
            plans.leave(row)
    return [(result.token_ids, result.logprobs) for result in sampled]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("case", "dtype"), [*IN_FLOAT32, *IN_BFLOAT16])
def test_padded_replays_give_the_bits_of_the_bare_step(case, dtype, native_ops, paths):
    model = models.load(open_checkpoint(paths(case)), ops=native_ops, dtype=dtype)

    def planner(backend: CpuGraphs | Eager, sizes: list[int]) -> HybridPlanner:
        runner = hybrid_runner(model, vocab_size=VOCAB, dtype=dtype, ops=native_ops, graphs=backend, graph_sizes=sizes)
        return HybridPlanner(runner)

    graphed = planner(CpuGraphs(native_ops, Regions()), [2, 5, NUM_ROWS + 2])
    assert entries(graphed, seed=4) == entries(planner(Eager(), list(range(1, NUM_ROWS + 1))), seed=4)
    extend = graphed.runner.extend.captured
    assert extend is not None
    assert extend.graphs
    cache, rows = graphed.runner.cache, graphed.runner.rows
    assert not rows.req_to_token[PAD].any()
    assert all(
        tensor[PAD].isfinite().all() for tensor in (*cache.tables["kv"].tensors, *cache.tables["window"].tensors)
    )
    assert not any(tensor[PAD].any() for tensor in cache.tables["state"].tensors), "slot 0 is never written"

"""Tiny real models of every kind through the runner: states, windows and latent KV that go to the host and come back,
and prefixes that others go on from, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.models import Model
from forebay.requests.step_plan import StepResult
from tests.models.tiny import VOCAB, random_ids, shared_tiny
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import NUM_ROWS
from tests.runtime.test_hybrid import entries

# Attention and Mamba-2, Mamba-1 and experts, delta nets, latent KV, states alone, convolutions and windows, windows.
CASES = ("falcon_h1", "jamba", "qwen3_next", "glm_moe_dsa", "mamba2", "lfm3", "gpt_oss")
TYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16))
TOKENS, OTHERS = random_ids(14, seed=1), random_ids(20, seed=2)

NewPlanner = Callable[[], HybridPlanner]


@pytest.fixture(scope="module")
def paths() -> Callable[[str], Path]:
    return lambda case: shared_tiny(case).path


@pytest.fixture(params=[(case, *types) for case in CASES for types in TYPES], ids=str)
def planner(request: pytest.FixtureRequest, paths, native_ops) -> NewPlanner:
    case, dtype, ssm_dtype = request.param
    model: Model = models.load(open_checkpoint(paths(case)), ops=native_ops, dtype=dtype)
    return lambda: HybridPlanner(hybrid_runner(model, vocab_size=VOCAB, dtype=dtype, ssm_dtype=ssm_dtype))


def run_alone(planner: NewPlanner, tokens: list[int], steps: int) -> list[StepResult]:
    plans = planner()
    plans.begin(1, tokens)
    return [plans.step(extends=[(1, len(tokens))])] + [plans.step(decodes=[1]) for _ in range(steps)]


def test_what_comes_back_from_the_host_goes_on_with_the_same_bits(planner):
    """C26"""
    plans = planner()
    plans.begin(1, TOKENS)
    got = [plans.step(extends=[(1, 14)])] + [plans.step(decodes=[1]) for _ in range(3)]
    said = [result.token_ids[0] for result in got]
    plans.save(1)
    plans.begin(1, OTHERS)
    plans.step(extends=[(1, 20)])
    plans.poison([1])
    plans.load(5, 1, TOKENS + said)
    got += [plans.step(extends=[(5, 1)], decodes=[1])] + [plans.step(decodes=[1, 5]) for _ in range(3)]
    expected = entries(run_alone(planner, TOKENS, steps=7))
    assert entries(got[:5]) + entries(got[5:], 1) == expected


def test_what_goes_on_from_a_snapshot_and_shared_pages_has_the_same_bits(planner):
    """C18: the snapshot is taken in the middle of a chunk in company."""
    plans = planner()
    plans.poison([])
    plans.begin(1, OTHERS)
    plans.begin(2, TOKENS)
    plans.step(extends=[(1, 7), (2, 12)], snapshots=[(1, 3, NUM_ROWS + 1), (2, 12, NUM_ROWS + 2), (2, 5, NUM_ROWS + 3)])
    plans.begin_from(4, TOKENS, 2, 12, NUM_ROWS + 2)
    got = [plans.step(extends=[(1, 13), (4, 2)])] + [plans.step(decodes=[1, 4]) for _ in range(4)]
    assert entries(got, 1) == entries(run_alone(planner, TOKENS, steps=4))

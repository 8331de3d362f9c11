"""EAGLE heads beside a model's steps keep what transformers' layers would have, and draft what these would."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.ops import Ops
from tests.models.eagles import Head, load_head, make_head, make_target
from tests.models.tiny import random_ids
from tests.runtime.conftest import Drafted, kept_by_head
from tests.runtime.fake_hybrid import HybridPlanner

WIDTH = 5
TOLERANCE = {"rtol": 0, "atol": 1e-4}
# As published; several layers; a hidden state that is normed before anything is added to it.
HEADS = {
    "eagle": {"third": False},
    "eagle-two-layers": {"third": False, "num_layers": 2},
    "eagle3": {"third": True},
    "eagle3-normed-stream": {"third": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def headed(tmp_path_factory) -> Callable[[str], Head]:
    @functools.cache
    def of(case: str) -> Head:
        folder = tmp_path_factory.mktemp(case)
        return make_head(make_target(folder), folder / "draft", **HEADS[case])

    return of


@pytest.fixture
def planner(drafting, headed) -> Callable[[str], HybridPlanner]:
    def load(oracle: Head, ops: Ops) -> Drafted:
        checkpoint = open_checkpoint(oracle.path.parent)
        model = models.load(checkpoint, ops=ops, dtype=torch.float32)
        return model, load_head(oracle.path, model, checkpoint.config, ops, third=oracle.third)

    return lambda case: drafting(functools.partial(load, headed(case)), WIDTH)


def check_kept(plans: HybridPlanner, row: int, oracle: Head, known: list[int]) -> None:
    expected = oracle.guesses(known[1:], oracle.seen(known[:-1]))[-1]
    torch.testing.assert_close(kept_by_head(plans, row), expected, **TOLERANCE)


@pytest.mark.parametrize("case", HEADS)
def test_an_eagle_head_keeps_and_drafts_what_its_layers_do_in_transformers(case, planner, headed):
    plans, oracle = planner(case), headed(case)
    known = {1: random_ids(13, seed=1), 2: random_ids(9, seed=2)}
    for row, tokens in known.items():
        plans.begin(row, tokens)
    plans.step(extends=[(1, 6), (2, 4)])
    check_kept(plans, 1, oracle, known[1][:7])
    check_kept(plans, 2, oracle, known[2][:5])
    for row, token in zip((1, 2), plans.step(extends=[(1, 7), (2, 5)]).token_ids, strict=True):
        known[row].append(token)
    for row, token in zip((1, 2), plans.step(decodes=[1, 2]).token_ids, strict=True):
        known[row].append(token)
        check_kept(plans, row, oracle, known[row])
    wanted = {1: 4, 2: 2}
    expected = {row: oracle.drafts(known[row], count) for row, count in wanted.items()}
    plans.runner.launch(plans.plan(decodes=list(wanted.items())))
    drafted = plans.runner.rows.draft_tokens
    assert {row: drafted[row, :count].tolist() for row, count in wanted.items()} == expected

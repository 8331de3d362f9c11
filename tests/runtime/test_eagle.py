"""EAGLE heads beside a model's steps keep what transformers' layers would have, and draft what these would."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.pools.regions import Regions
from forebay.runtime.graph_backends import Eager, graphs_for
from tests.kernels import NATIVE
from tests.models.eagles import Head, load_head, make_head, make_target
from tests.models.tiny import VOCAB, random_ids
from tests.runtime.conftest import made
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner

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


@pytest.fixture(params=[("torch", False), (NATIVE, False), (NATIVE, True)], ids=["torch", "native", "graphs"])
def planner(request, headed) -> Callable[[str], HybridPlanner]:
    backend, captured = request.param
    ops = made(backend)

    def of(case: str) -> HybridPlanner:
        oracle = headed(case)
        checkpoint = open_checkpoint(oracle.path.parent)
        model = models.load(checkpoint, ops=ops, dtype=torch.float32)
        drafter = load_head(oracle.path, model, checkpoint.config, ops, third=oracle.third)
        graphs = graphs_for(ops, "cpu", Regions()) if captured else Eager()
        return HybridPlanner(
            hybrid_runner(model, vocab_size=VOCAB, ops=ops, graphs=graphs, width=WIDTH, drafter=drafter)
        )

    return of


def check_kept(plans: HybridPlanner, row: int, oracle: Head, known: list[int]) -> None:
    """The head's state, of the last token but one of those known, beside the last."""
    expected = oracle.guesses(known[1:], oracle.seen(known[:-1]))[-1]
    torch.testing.assert_close(plans.runner.proposer.head.kept["hidden"][row], expected, **TOLERANCE)


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

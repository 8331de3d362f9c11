"""A draft model beside a model's steps keeps of every token what it would keep alone, and drafts what it would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.pools.regions import Regions
from forebay.runtime.graphs.backends import Eager, graphs_for
from tests.engine.conftest import greedy
from tests.kernels import NATIVE
from tests.models.tiny import VOCAB, Tiny, make_oracle, random_ids, shared_tiny
from tests.runtime.conftest import made
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.plans import Decode
from tests.runtime.verifying import kv_of

DRAFT = "llama"
WIDTH = 5


@pytest.fixture(params=["eager", "graphs"])
def planner(request: pytest.FixtureRequest) -> Callable[..., HybridPlanner]:
    return planner_of(NATIVE, captured=request.param == "graphs")


def planner_of(backend: str, *, captured: bool) -> Callable[..., HybridPlanner]:
    """Of a model of the type given, for which another drafts, or nobody."""
    ops = made(backend)
    graphs = graphs_for(ops, "cpu", Regions()) if captured else Eager()

    def of(path: Path, draft: Path | None = None) -> HybridPlanner:
        model = models.load(open_checkpoint(path), ops=ops, dtype=torch.float32)
        options = {"vocab_size": VOCAB, "ops": ops, "graphs": graphs}
        if draft is not None:
            checkpoint, first = open_checkpoint(draft), len(model.cache_specs())
            options["draft_model"] = models.load(checkpoint, ops=ops, dtype=torch.float32, first_entry=first)
        return HybridPlanner(hybrid_runner(model, width=1 if draft is None else WIDTH, **options))

    return of


def check_kept(plans: HybridPlanner, alone: HybridPlanner, known: dict[int, list[int]], *, lacking: int) -> None:
    """Of all tokens with KV in the model but the last `lacking` ones."""
    for row, tokens in known.items():
        if length := int(plans.lens[row]):
            alone.begin(row, tokens[:length])
            alone.step(extends=[(row, length)])
            expected = kv_of(alone, row)
            for ours, theirs in zip(kv_of(plans, row)[-len(expected) :], expected, strict=True):
                torch.testing.assert_close(ours[: length - lacking], theirs[: length - lacking], rtol=0, atol=1e-4)


def step(plans: HybridPlanner, known: dict[int, list[int]], extends: Sequence, decodes: Sequence[Decode]) -> list[int]:
    """`known` grows by what it samples; how many tokens each of the decodes got."""
    plan = plans.plan(extends=extends, decodes=decodes)
    result = plans.settle(plan, plans.runner.launch(plan).result())
    counts = result.num_new or plan.sample_mask.astype(int).tolist()
    new = iter(result.token_ids)
    for row, count in zip(plan.rows.tolist(), counts, strict=True):
        known[row] += [next(new) for _ in range(count)]
    return counts[plan.num_extends :]


Step = tuple[list, list[Decode]]
DECODES: tuple[Step, ...] = (
    ([], [(1, 3), (2, 1)]),
    ([], [1, 2]),
    ([], [(1, 4)]),
    ([(3, 4)], [1, 2]),
    ([], [(2, 4), 1]),
    ([], [(2, 2), (1, 2)]),
)


def test_a_draft_model_drafts_with_the_reference_ops():
    check_drafts("qwen2", shared_tiny(DRAFT), planner_of("torch", captured=False), DECODES[:1])


def test_a_draft_model_whose_layers_share_kv_reads_its_own(tmp_path):
    oracle = make_oracle("gemma4_text", num_hidden_layers=3, layer_types=["full_attention"] * 3, num_kv_shared_layers=1)
    oracle.save_pretrained(tmp_path)
    check_drafts("qwen2", Tiny(tmp_path, oracle), planner_of(NATIVE, captured=True), DECODES[:1])


@pytest.mark.parametrize("target", ["llama", "qwen3_5_text", "mistral-window"])
def test_a_draft_model_keeps_and_drafts_what_it_would_alone(target, planner):
    """Whether its drafts are all accepted, those of the model itself, or hardly ever; in chunks and in any company."""
    check_drafts(target, shared_tiny(DRAFT), planner, DECODES)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_c30_kv_of_a_draft_model_that_is_not_finite_is_zeroed(planner, value):
    """The prefix cache has such pages: what begins behind them is guessed for again once the weights are right."""
    path = shared_tiny(DRAFT).path
    plans, known = planner(path, path), {1: random_ids(9, seed=1)}
    plans.begin(1, known[1])
    model = plans.runner.proposer.drafting.model
    weights = model._blocks[0]._sublayers[0].before.of.keywords["weight"]
    right = weights.clone()
    weights.fill_(value)
    step(plans, known, [(1, 9)], [])
    for _ in range(3):
        step(plans, known, [], [(1, 3)])
    assert len(known[1]) > 9
    assert not any(layer.any() for layer in kv_of(plans, 1)[-len(model.cache_specs()) :])
    weights.copy_(right)
    for _ in range(2):
        step(plans, known, [], [(1, 3)])
    assert all(layer.isfinite().all() for layer in kv_of(plans, 1))


def check_drafts(target: str, draft: Tiny, planner: Callable[..., HybridPlanner], steps: Sequence[Step]) -> None:
    plans, alone = planner(shared_tiny(target).path, draft.path), planner(draft.path)
    known = {row: random_ids(length, seed=row) for row, length in ((1, 9), (2, 6), (3, 5))}
    for row in (1, 2):
        plans.begin(row, known[row])
    step(plans, known, [(1, 4), (2, 3)], [])
    step(plans, known, [(1, 5), (2, 3)], [])
    check_kept(plans, alone, {row: known[row] for row in (1, 2)}, lacking=0)
    plans.begin(3, known[3])
    for extends, decodes in steps:
        wide = dict(wanted for wanted in decodes if not isinstance(wanted, int))
        expected = {row: greedy(draft, known[row], count) for row, count in wide.items()}
        counts = step(plans, known, extends, decodes)
        drafted = plans.runner.rows.draft_tokens
        assert {row: drafted[row, : wide[row]].tolist() for row in wide} == expected
        check_kept(plans, alone, known, lacking=1)
        if target == DRAFT:
            assert counts == [1 + wide.get(row if isinstance(row, int) else row[0], 0) for row in decodes]


def test_a_draft_model_writes_nothing_for_rows_that_draft_fewer_tokens_than_others(planner):
    """Behind their pages, where their line of the page table may name another's."""
    plans = planner(shared_tiny("qwen3_5_text").path, shared_tiny(DRAFT).path)
    known = {1: random_ids(7, seed=6), 2: random_ids(6, seed=7)}
    for row, tokens in known.items():
        plans.begin(row, tokens)
    step(plans, known, [(1, 7), (2, 6)], [])
    plans.runner.rows.req_to_token[2, 2:] = int(plans.pages[1, 0])
    before = [tensor[:4].clone() for tensor in kv_of(plans, 1)]
    step(plans, known, [], [(1, 4), (2, 1)])
    for kept, was in zip(kv_of(plans, 1), before, strict=True):
        assert torch.equal(kept[:4], was)

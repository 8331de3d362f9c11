"""A model's own draft head beside its steps keeps what transformers' head would have, and drafts what it would."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.models.drafter import OwnHead
from forebay.ops import Ops
from forebay.runtime.graphs.backends import Eager
from tests.kernels import NATIVE
from tests.models.heads import Headed, make_headed
from tests.models.tiny import VOCAB, random_ids
from tests.runtime.conftest import Drafted, made
from tests.runtime.conftest import kept_by_head as kept
from tests.runtime.fake_hybrid import HybridPlanner, hybrid_runner
from tests.runtime.fake_model import PAGE_SIZE

WIDTH = 6
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def headed(tmp_path_factory) -> Callable[[str], Headed]:
    @functools.cache
    def of(case: str) -> Headed:
        return make_headed(case, tmp_path_factory.mktemp("headed"))

    return of


@pytest.fixture
def planner(drafting, headed) -> Callable[[str], HybridPlanner]:
    def load(case: str, ops: Ops) -> Drafted:
        checkpoint = open_checkpoint(headed(case).path, draft_head=True)
        model = models.load(checkpoint, ops=ops, dtype=torch.float32, draft_head=True)
        return model, OwnHead(model, ops)

    return lambda case: drafting(functools.partial(load, case), WIDTH)


def expected_state(oracle: Headed, known: list[int]) -> torch.Tensor:
    hidden, _ = oracle.drafted(known[1:], oracle.hidden(known[:-1]))
    return hidden[-1]


@pytest.mark.quick(5)
@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32", "qwen3_next", "nemotron_h"])
def test_chunks_and_decodes_in_any_company_leave_the_heads_state(case, planner, headed):
    plans, oracle = planner(case), headed(case)
    known = {1: random_ids(13, seed=1), 2: random_ids(9, seed=2)}
    for row, tokens in known.items():
        plans.begin(row, tokens)
    plans.step(extends=[(1, 6), (2, 4)])
    torch.testing.assert_close(kept(plans, 1), expected_state(oracle, known[1][:7]), **TOLERANCE)
    torch.testing.assert_close(kept(plans, 2), expected_state(oracle, known[2][:5]), **TOLERANCE)
    known[2] += plans.step(extends=[(1, 2), (2, 5)]).token_ids
    known_of_both = plans.step(extends=[(1, 5)], decodes=[2]).token_ids
    for row, token in zip((1, 2), known_of_both, strict=True):
        known[row].append(token)
    for _ in range(3):
        for row, token in zip((1, 2), plans.step(decodes=[1, 2]).token_ids, strict=True):
            known[row].append(token)
            torch.testing.assert_close(kept(plans, row), expected_state(oracle, known[row]), **TOLERANCE)


def drafted(oracle: Headed, known: list[int], count: int) -> list[int]:
    """What transformers' head drafts behind the known tokens."""
    hidden, next_ids = oracle.hidden(known[:-1]), list(known[1:])
    for _ in range(count):
        states, logits = oracle.drafted(next_ids, hidden)
        next_ids.append(int(logits[-1].argmax()))
        hidden = torch.cat([hidden, states[-1:]])
    return next_ids[-count:]


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_5_text"])
def test_rows_draft_as_many_tokens_as_they_are_to(case, planner, headed):
    plans, oracle = planner(case), headed(case)
    known = {1: random_ids(9, seed=3), 2: random_ids(6, seed=4), 3: random_ids(5, seed=5)}
    for row, tokens in known.items():
        plans.begin(row, tokens)
    for row, token in zip(known, plans.step(extends=[(row, len(known[row])) for row in known]).token_ids, strict=True):
        known[row].append(token)
    wanted = {1: 3, 2: 1, 3: 2}
    plan = plans.plan(decodes=list(wanted.items()))
    plans.runner.launch(plan)
    for row, count in wanted.items():
        assert plans.runner.rows.draft_tokens[row, :count].tolist() == drafted(oracle, known[row], count)


def test_a_row_that_drafts_fewer_tokens_writes_nothing_behind_its_pages(planner, headed):
    """Where its line of the page table names another's page."""
    plans, oracle = planner("deepseek_v3"), headed("deepseek_v3")
    known = {1: random_ids(8, seed=6), 2: random_ids(6, seed=7)}
    for row, tokens in known.items():
        plans.begin(row, tokens)
    for row, token in zip(known, plans.step(extends=[(row, len(known[row])) for row in known]).token_ids, strict=True):
        known[row].append(token)
    plans.runner.rows.req_to_token[2, 2:] = int(plans.pages[1, 0])
    head = plans.runner.cache.kv(len(plans.runner.cache.specs) - 1)
    locations = slice(*(int(plans.pages[1, 0]) * PAGE_SIZE + end for end in (0, PAGE_SIZE)))
    before = head.k[locations].clone()
    plans.step(decodes=[(1, 5), (2, 1)])
    assert torch.equal(head.k[locations], before)
    assert plans.runner.rows.draft_tokens[1].tolist() == drafted(oracle, known[1], 5)


@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next", "mellum"])
def test_c30_what_is_not_finite_in_a_head_alone_harms_nobody_and_is_not_kept(case, planner):
    """Who goes on behind such pages, which the prefix cache may have, is guessed for again."""
    plans, known = planner(case), random_ids(13, seed=9)
    plans.begin(1, known)
    weights = plans.runner.proposer.head.drafter._model._draft_head._norms[0]
    right = weights.clone()
    weights.fill_(float("nan"))
    assert plans.step(extends=[(1, 8)]).failed == ()
    assert kept(plans, 1).isnan().all()
    for _, layer in plans.runner.proposer.head.layers:
        assert layer.k.isfinite().all()
    weights.copy_(right)
    assert plans.step(extends=[(1, 5)]).failed == ()
    assert kept(plans, 1).isfinite().all()


class Overwriting(Eager):
    """A capture computes where the outputs of the last graph lie, as on a GPU."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, ...] = ()

    def capture(self, step):
        for tensor in self._last:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

        def replay():
            self._last = step()
            return self._last

        return replay


def test_a_graph_that_is_made_late_is_fed_with_what_the_step_computed(headed):
    oracle, ops = headed("deepseek_v3"), made(NATIVE)
    model = models.load(open_checkpoint(oracle.path, draft_head=True), ops=ops, dtype=torch.float32, draft_head=True)
    options = {"vocab_size": VOCAB, "ops": ops, "graphs": Overwriting(), "width": WIDTH}
    options["drafter"] = OwnHead(model, ops)
    plans, known = HybridPlanner(hybrid_runner(model, **options)), random_ids(7, seed=8)
    plans.begin(1, known)
    known += plans.step(extends=[(1, 7)]).token_ids
    for _ in range(3):
        plans.runner.proposer.follow.graphs.clear()
        known += plans.step(decodes=[1]).token_ids
        torch.testing.assert_close(kept(plans, 1), expected_state(oracle, known), **TOLERANCE)

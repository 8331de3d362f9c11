from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forebay.ops import Gating, Scoring
from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(12)

SOFTMAX = Gating(num_experts_per_tok=3, scoring=Scoring.SOFTMAX, normalize=False)
SIGMOID = Gating(num_experts_per_tok=3, scoring=Scoring.SIGMOID, normalize=True, epsilon=1e-20, scale=2.5)
GROUPED = replace(SIGMOID, groups=4, best_groups=2)
CLAMPED = replace(SOFTMAX, normalize=True, least_sum=0.4)
BY_THE_BEST = replace(SOFTMAX, groups=6, best_groups=2, summed=1, scale=2.5)
GATINGS = [
    *(SOFTMAX, replace(SOFTMAX, normalize=True), SIGMOID, GROUPED),
    *(replace(SOFTMAX, groups=6, best_groups=5), BY_THE_BEST, CLAMPED),
]


def _correction(num_experts: int) -> Tensor:
    return normal((num_experts,), torch.float32, seed=2, scale=0.3)


@pytest.mark.parametrize("gating", GATINGS, ids=repr)
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("num_experts", [12, 48, 132])
@pytest.mark.parametrize("corrected", [False, True])
def test_gating_equals_the_reference(
    native: NativeOps, reference: Ops, gating: Gating, rows: int, num_experts: int, corrected: bool
) -> None:
    logits = normal((rows, num_experts), torch.float32, seed=1, scale=2)
    own = (_correction(num_experts), normal((num_experts,), torch.float32, seed=3)) if corrected else ()
    (ids, weights), (their_ids, their_weights) = (
        ops.experts.topk_gating(logits, gating, *own) for ops in (native, reference)
    )
    assert_same_bits(ids, their_ids)
    assert_close(weights, their_weights)


@pytest.mark.parametrize("gating", GATINGS, ids=repr)
def test_a_token_does_not_depend_on_the_others(native: NativeOps, single_threaded: NativeOps, gating: Gating) -> None:
    logits = normal((200, 48), torch.float32, seed=1)
    together = native.experts.topk_gating(logits, gating, _correction(48))
    for ops, rows in ((native, slice(17, 18)), (single_threaded, slice(None))):
        for got, expected in zip(ops.experts.topk_gating(logits[rows], gating, _correction(48)), together, strict=True):
            assert_same_bits(got, expected[rows])


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.4])
def test_sparse_mixer_equals_the_reference_and_no_other_row_changes_it(
    native: NativeOps, reference: Ops, jitter: float
) -> None:
    logits = normal((200, 16), torch.float32, seed=1, scale=2)
    logits[3] -= 20.0
    logits[4, :3] = logits[4, 5]
    (ids, weights), (their_ids, their_weights) = (
        ops.experts.sparse_mixer(logits, jitter) for ops in (native, reference)
    )
    assert_same_bits(ids, their_ids)
    assert_close(weights, their_weights)
    alone = native.experts.sparse_mixer(logits[17:18].clone(), jitter)
    assert_same_bits(alone[1], weights[17:18])
    assert native.experts.sparse_mixer(logits[:0], jitter)[0].shape == (0, 2)


def test_sparse_mixer_weighs_an_expert_against_those_that_are_near(each_ops: Ops) -> None:
    logits = torch.tensor([[1.0, 0.9, -3.0, 0.5], [-1.0, -5.0, -1.1, -4.0]])
    ids, weights = each_ops.experts.sparse_mixer(logits, 0.1)
    assert ids.tolist() == [[0, 1], [0, 2]]
    near = [[1 / (1 + math.exp(-0.1)), 1.0], [1 / (1 + math.exp(-0.1)), 1.0]]
    assert_close(weights, torch.tensor(near))


def test_sparse_mixer_of_nan_chooses_experts_that_there_are_and_shows_it(each_ops: Ops) -> None:
    ids, weights = each_ops.experts.sparse_mixer(torch.tensor([[1.0, float("nan"), 2.0, 0.0], [float("nan")] * 4]), 0.1)
    assert ids.tolist() == [[2, 0], [0, 1]]
    assert weights.isnan().all()


def test_of_equal_scores_the_first_experts_are_chosen(each_ops: Ops) -> None:
    ids, weights = each_ops.experts.topk_gating(torch.zeros(2, 12), GROUPED)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert_close(weights, torch.full((2, 3), 2.5 / 3))


def test_a_group_counts_what_its_best_expert_or_its_two_best_do(each_ops: Ops) -> None:
    """The last group has the best expert, the first the two best together."""
    logits = torch.tensor([[3.0, 2.9, 1.0, 0.9, 3.1, -5.0]])
    one_group = replace(SIGMOID, num_experts_per_tok=2, groups=3)
    assert each_ops.experts.topk_gating(logits, one_group)[0].tolist() == [[0, 1]]
    assert each_ops.experts.topk_gating(logits, replace(one_group, summed=1))[0].tolist() == [[4, 5]]


def test_groups_of_one_expert_are_chosen_by_it(each_ops: Ops) -> None:
    logits = torch.tensor([[3.0, 2.9, 1.0, 3.1]])
    alone = replace(SOFTMAX, num_experts_per_tok=2, groups=4, best_groups=2, summed=1)
    assert each_ops.experts.topk_gating(logits, alone)[0].tolist() == [[3, 0]]


def test_what_an_expert_weighs_is_multiplied_by_its_own_factor(each_ops: Ops) -> None:
    logits, factors = normal((5, 12), torch.float32, seed=1), normal((12,), torch.float32, seed=3)
    ids, weights = each_ops.experts.topk_gating(logits, GROUPED)
    same, scaled = each_ops.experts.topk_gating(logits, GROUPED, factors=factors)
    assert_same_bits(same, ids)
    assert_close(scaled, weights * factors[ids])


def test_all_of_the_experts_can_be_chosen(each_ops: Ops) -> None:
    ids, weights = each_ops.experts.topk_gating(torch.tensor([[0.5, 2.0, 1.0]]), replace(SOFTMAX, normalize=True))
    assert ids.tolist() == [[1, 2, 0]]
    assert_close(weights.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("gating", GATINGS, ids=repr)
def test_ids_stay_in_range_whatever_a_padded_row_holds_c14(each_ops: Ops, gating: Gating, value: float) -> None:
    logits = normal((3, 12), torch.float32, seed=1)
    expected = each_ops.experts.topk_gating(logits, gating)
    logits[1] = value
    ids, weights = each_ops.experts.topk_gating(logits, gating)
    assert sorted(set(ids[1].tolist())) == sorted(ids[1].tolist())
    assert ids.min() >= 0
    assert ids.max() < 12
    for row in (0, 2):
        assert_same_bits(ids[row], expected[0][row])
        assert_close(weights[row], expected[1][row])

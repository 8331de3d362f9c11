"""C28, C31: what the CPU's kernels promise of equal bits, asked of a GPU's; see `test_triton`.

Products, experts and codes are in `test_triton_linear`, attention in `test_triton_segments`, scans in `test_triton`,
compressed attention and streams in `test_triton_compressed`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.reference.norms import GatedNorm
from forebay.ops.reference.sampling import Draws
from tests.ops.helpers import PagedCase, assert_same_bits, normal
from tests.ops.test_adapters import LAYERS, RANKS, added, table_of
from tests.ops.test_routing import GATINGS
from tests.ops.test_sampling import draws_of
from tests.ops.test_selection import case
from tests.ops.test_triton import device, ops
from tests.runtime.elementwise import SameEverywhere

__all__ = ["device", "ops"]  # fixtures


def test_c31_norms_of_a_row_are_the_same_among_any_number_of_rows(ops: Ops) -> None:
    x, weight, norms = normal((5, 48), torch.float32, seed=1), normal((48,), torch.float32, seed=2), ops.norms

    def of(at: slice) -> list[torch.Tensor]:
        rows, residual = x[at].clone(), x[at] + 1
        gated = norms.gated_rms_norm(rows, rows, GatedNorm(weight, 1e-5, 24, True, sigmoid=True))
        return [
            norms.rms_norm(rows, weight, 1e-5),
            norms.layer_norm(rows, weight, weight, 1e-5),
            norms.add_rms_norm(rows, residual, weight, 1e-5),
            residual,
            gated,
        ]

    for alone, whole in zip(of(slice(3, 4)), of(slice(None)), strict=True):
        assert_same_bits(alone, whole[3:4])


@pytest.mark.parametrize("gating", GATINGS[1:4], ids=repr)
def test_c31_choice_of_experts_is_the_same_among_any_number_of_tokens(ops: Ops, device: str, gating: object) -> None:
    logits, correction = normal((70, 12), torch.float32, seed=1), normal((12,), torch.float32, seed=2, scale=0.3)
    with SameEverywhere():
        together = ops.experts.topk_gating(logits, gating, correction)
        alone = ops.experts.topk_gating(logits[17:18], gating, correction)
    for one, all_tokens in zip(alone, together, strict=True):
        assert_same_bits(one, all_tokens[17:18])


def test_c28_sampled_token_is_the_same_in_any_batch(ops: Ops) -> None:
    logits, draws = normal((4, 97), torch.float32, seed=1, scale=2), draws_of(1)
    draws = Draws(*(column if column is None else column[:4] for column in draws))
    together = ops.sampling.sample_rows(logits, draws)
    for at in (slice(0, 1), slice(2, 4)):
        alone = Draws(*(column if column is None else column[at] for column in draws))
        assert_same_bits(ops.sampling.sample_rows(logits[at].clone(), alone), together[at])


def test_c31_attention_within_pictures_is_the_same_in_any_batch_and_chunk(ops: Ops) -> None:
    pictures = ((0, 1, 4), (1, 3, 20))
    paged = PagedCase(seq_lens=[5, 24], query_lens=[5, 24], head_dim=16, pictures=pictures, sliding_window=9)
    whole = paged.run(ops)
    for first, end in ((0, 24), (7, 20)):
        assert_same_bits(paged.run(ops, [1], until={1: (first, end)}), whole[5 + first : 5 + end])


def test_c31_selection_of_a_query_is_the_same_in_any_batch(ops: Ops) -> None:
    indexed = case(3, 20, seq_lens=[9, 40, 33], query_lens=[2, 5, 1])
    q, weights, keys = indexed.indexer(exact=False)
    together = ops.selection.select_tokens(q, weights, keys, indexed.paged, 7)
    for i, (begin, end) in enumerate(pairwise(indexed.paged.q_start.tolist())):
        paged = indexed.paged
        one = replace(
            paged,
            rows=paged.rows[i : i + 1],
            seq_lens=paged.seq_lens[i : i + 1],
            q_start=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        alone = ops.selection.select_tokens(q[begin:end].clone(), weights[begin:end].clone(), keys, one, 7)
        for mine, every in zip(alone, together, strict=True):
            assert_same_bits(mine, every[begin:end])


def test_c31_what_an_adapter_adds_does_not_depend_on_the_largest_rank_and_the_slot(ops: Ops) -> None:
    table, x = table_of(LAYERS, 64, torch.float32), normal((3, 64), torch.float32, seed=6)
    moved = table_of(LAYERS, 64, torch.float32, [[0, 0], RANKS[5]])
    most = moved.a.shape[2]
    assert most < table.a.shape[2]
    moved.a[1], moved.b[1] = table.a[5, :, :most], table.b[5, :, :most]
    one, five = (torch.full((3,), slot, dtype=torch.int32) for slot in (1, 5))
    assert_same_bits(added(ops, moved, x, one), added(ops, table, x, five))

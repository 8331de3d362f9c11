"""The selection of tokens for sparse attention, against its definition: ties, pages, batches, poison (C5)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.attention import KvCache, PagedKv
from tests.ops.helpers import PagedCase, assert_same_bits, no_sequences, normal

NAN = float("nan")
SHAPES = {"one-head": (1, 8), "odd": (3, 20), "as-published": (4, 128)}


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose products and sums are exact, of which many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Indexed(PagedCase):
    """Sequences with an index key for each token, and an indexer's queries and weights."""

    def indexer(self, *, exact: bool) -> tuple[Tensor, Tensor, KvCache]:
        tokens = sum(self.query_lens)
        draw = whole if exact else normal
        q = draw((tokens, self.q_heads, self.head_dim), self.dtype, 3)
        weights = draw((tokens, self.q_heads), torch.float32, 5)
        keys = self.k_cache
        if exact:
            keys = torch.where(keys.isnan(), keys, whole(keys.shape, keys.dtype, 7)) if not self.int8 else keys
        return q, weights, KvCache(keys, keys, self.k_scale, self.k_scale)


def case(heads: int, head_dim: int, dtype: torch.dtype = torch.float32, **changes: object) -> Indexed:
    given = {"seq_lens": [1, 70, 33, 300, 64, 129], "query_lens": [1, 70, 5, 1, 1, 65], **changes}
    return Indexed(q_heads=heads, kv_heads=1, head_dim=head_dim, dtype=dtype, **given)  # type: ignore[arg-type]


def assert_selected(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_same_bits(got[1], expected[1])
    assert_same_bits(got[0], expected[0])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("top_k", [1, 7, 64, 128, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_selected_tokens_are_the_reference_s_ties_included(
    native: NativeOps, reference: Ops, dtype: torch.dtype, shape: str, top_k: int, page_size: int
) -> None:
    indexed = case(*SHAPES[shape], dtype, page_size=page_size, mapped=page_size == 16)
    q, weights, keys = indexed.indexer(exact=True)
    expected = reference.selection.select_tokens(q, weights, keys, indexed.paged, top_k)
    assert_selected(native.selection.select_tokens(q, weights, keys, indexed.paged, top_k), expected)


def test_keys_in_eight_bits_are_scored_as_what_they_stand_for(native: NativeOps, reference: Ops) -> None:
    """Codes of 127 at most and scales that are powers of two: sums are exact."""
    indexed = case(3, 20, int8=True)
    q, weights, keys = indexed.indexer(exact=True)
    scale = torch.full_like(indexed.k_scale, 0.25)
    codes = whole(keys.k.shape, torch.int8, 11)
    keys = KvCache(codes, codes, scale, scale)
    expected = reference.selection.select_tokens(q, weights, keys, indexed.paged, 20)
    assert_selected(native.selection.select_tokens(q, weights, keys, indexed.paged, 20), expected)


def test_weights_for_all_tokens_select_as_the_same_weights_for_each(each_ops: Ops) -> None:
    indexed = case(3, 20)
    q, weights, keys = indexed.indexer(exact=True)
    shared = weights[:1].clone()
    each = shared.expand(weights.shape).contiguous()
    got, expected = (each_ops.selection.select_tokens(q, some, keys, indexed.paged, 9) for some in (shared, each))
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_of_equal_scores_the_earlier_token_is_selected(each_ops: Ops) -> None:
    """Nothing is better than anything else where every product is negative."""
    indexed = case(2, 8, seq_lens=[40], query_lens=[40])
    q, weights, keys = indexed.indexer(exact=True)
    positions, counts = each_ops.selection.select_tokens(torch.zeros_like(q), weights, keys, indexed.paged, 9)
    assert counts.tolist() == [min(9, i + 1) for i in range(40)]
    assert [row[row >= 0].tolist() for row in positions] == [list(range(min(9, i + 1))) for i in range(40)]


def test_a_query_whose_key_is_not_a_number_selects_nothing_and_its_attention_is_nan(each_ops: Ops) -> None:
    """Even where everything would be selected, and nothing needs a score."""
    indexed = case(2, 8, seq_lens=[40], query_lens=[2])
    q, weights, keys = indexed.indexer(exact=True)
    keys.k[indexed.page_table[1, 38 // 16] * 16 + 38 % 16] = NAN
    for top_k in (3, 100):
        positions, counts = each_ops.selection.select_tokens(q, weights, keys, indexed.paged, top_k)
        assert counts.tolist() == [0, min(top_k, 40)]
        assert positions[0].unique().tolist() == [-1]
        pages = each_ops.selection.token_pages(positions, counts, indexed.paged)
        cache = KvCache(*(torch.ones(keys.k.shape) for _ in range(2)))
        out = each_ops.attention.paged_attention(q, cache, pages, scale=1.0)
        assert out.isnan().flatten(1).all(dim=1).tolist() == [True, False]


def test_a_query_whose_scores_are_not_numbers_selects_nothing(each_ops: Ops) -> None:
    """Where it sees more than it may select: what it would read has been chosen by nothing."""
    indexed = case(2, 8, seq_lens=[40], query_lens=[3])
    q, weights, keys = indexed.indexer(exact=True)
    q[1] = NAN
    assert each_ops.selection.select_tokens(q, weights, keys, indexed.paged, 9)[1].tolist() == [9, 0, 9]
    assert each_ops.selection.select_tokens(q, weights, keys, indexed.paged, 100)[1].tolist() == [38, 39, 40]


def test_a_key_that_is_not_a_number_is_selected(each_ops: Ops) -> None:
    """What is not finite is not overlooked by later queries."""
    indexed = case(2, 8, seq_lens=[40], query_lens=[1])
    q, weights, keys = indexed.indexer(exact=True)
    location = indexed.page_table[1, 23 // 16] * 16 + 23 % 16
    keys.k[location] = NAN
    positions, _ = each_ops.selection.select_tokens(q, weights, keys, indexed.paged, 3)
    assert 23 in positions[0].tolist()


def test_a_query_s_selection_does_not_depend_on_the_others(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    """Alone, in any chunk, with one thread or two, and on other pages the same tokens are selected."""
    whole_batch = case(4, 128, dtype)
    q, weights, keys = whole_batch.indexer(exact=False)
    elsewhere = case(4, 128, dtype, page_size=4)  # the keys of a sequence and position are the same
    kept = KvCache(elsewhere.k_cache, elsewhere.k_cache)
    for ops, there, where in ((single_threaded, keys, whole_batch), (native, kept, elsewhere)):
        assert_selected(
            ops.selection.select_tokens(q, weights, there, where.paged, 30),
            native.selection.select_tokens(q, weights, keys, whole_batch.paged, 30),
        )
    together, _ = native.selection.select_tokens(q, weights, keys, whole_batch.paged, 30)
    starts = whole_batch.paged.q_start.tolist()
    for i, (first, end) in enumerate(pairwise(starts)):
        length = whole_batch.seq_lens[i]
        for at in {first, (first + end) // 2, end - 1}:
            alone = replace(
                whole_batch.paged,
                rows=whole_batch.paged.rows[i : i + 1],
                q_start=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.tensor([length - (end - 1 - at)], dtype=torch.int32),
            )
            positions, _ = native.selection.select_tokens(q[at : at + 1], weights[at : at + 1], keys, alone, 30)
            assert_same_bits(positions, together[at : at + 1])


EVERY = {"seq_lens": [1, 70, 33, 700], "query_lens": [1, 70, 5, 1]}


@pytest.mark.parametrize("int8", [False, True])
def test_attention_over_all_tokens_has_the_bits_of_dense_attention(
    native: NativeOps, dtype: torch.dtype, int8: bool
) -> None:
    dense = Indexed(
        **EVERY,
        q_heads=5,
        kv_heads=1,
        head_dim=80,
        v_dim=64,
        latent=True,
        dtype=dtype,
        int8=int8,
    )
    q = torch.cat([queries[len(queries) - n :] for queries, n in zip(dense.queries, dense.query_lens, strict=True)])
    lens = zip(dense.seq_lens, dense.query_lens, strict=True)
    at = torch.cat([torch.arange(length - n, length) for length, n in lens])
    positions = torch.arange(max(dense.seq_lens), dtype=torch.int32).expand(len(at), -1)
    positions = positions.masked_fill(positions > at.unsqueeze(1), -1)
    pages = native.selection.token_pages(positions, (at + 1).int(), dense.paged)
    assert_same_bits(
        native.attention.paged_attention(q, dense.cache, pages, scale=0.1),
        native.attention.paged_attention(q, dense.cache, dense.paged, scale=0.1),
    )


@pytest.mark.parametrize("mapped", [False, True])
def test_token_pages_are_the_reference_s(native: NativeOps, reference: Ops, mapped: bool) -> None:
    indexed = case(2, 8, mapped=mapped)
    q, weights, keys = indexed.indexer(exact=True)
    positions, counts = native.selection.select_tokens(q, weights, keys, indexed.paged, 12)
    got, expected = (ops.selection.token_pages(positions, counts, indexed.paged) for ops in (native, reference))
    for name in ("page_table", "rows", "q_start", "seq_lens"):
        assert_same_bits(getattr(got, name), getattr(expected, name))
    assert got.page_size == expected.page_size == 1


def test_no_tokens_have_no_selection(each_ops: Ops) -> None:
    q, weights, keys = torch.empty(0, 2, 8), torch.empty(0, 2), torch.empty(16, 1, 8)
    positions, counts = each_ops.selection.select_tokens(q, weights, KvCache(keys, keys), no_sequences(), 5)
    assert (positions.shape, counts.shape) == ((0, 5), (0,))
    pages: PagedKv = each_ops.selection.token_pages(positions, counts, no_sequences())
    assert pages.q_start.tolist() == [0]


@pytest.mark.parametrize("rate", [2, 4, 16])
@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_tokens_of_selected_blocks_are_those_of_the_blocks_and_of_the_open_one(
    each_ops: Ops, top_k: int, rate: int
) -> None:
    """A query whose selection failed, and one of a sequence without tokens, select nothing."""
    paged = case(2, 8, seq_lens=[0, 40, 70, 3], query_lens=[2, 40, 5, 1], page_size=16).paged
    positions = torch.cat([torch.arange(2), torch.arange(40), torch.arange(65, 70), torch.tensor([2])])
    failed, generator = 44, torch.Generator().manual_seed(rate)  # the query at position 67
    blocks = torch.full((48, top_k), -1, dtype=torch.int32)
    counts = ((positions + 1) // rate).clamp(max=top_k).int()
    for i, position in enumerate(positions.tolist()):
        best = torch.randperm((position + 1) // rate, generator=generator)[: counts[i]]
        blocks[i, : counts[i]] = best.sort().values
    counts[failed] = 0
    tokens, totals = each_ops.selection.block_tokens(blocks, counts, positions, paged, rate)
    for i, position in enumerate(positions.tolist()):
        chosen = [block * rate + j for block in blocks[i, : counts[i]].tolist() for j in range(rate)]
        chosen += range((position + 1) // rate * rate, position + 1)
        expected = [] if i < 2 or i == failed else chosen
        assert tokens[i].tolist() == [*expected, *[-1] * (tokens.shape[1] - len(expected))]
        assert totals[i] == len(expected)

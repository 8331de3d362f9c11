"""The GPU's selection of tokens equals the reference, ties included; see `test_triton`."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.reference.attention import KvCache
from tests.ops.helpers import assert_close, assert_same_bits, no_sequences
from tests.ops.test_selection import case, whole
from tests.ops.test_triton import device, ops, reference
from tests.ops.triton_device import attention

__all__ = ["device", "ops", "reference"]  # fixtures

SMALL = {"seq_lens": [1, 40, 33, 70], "query_lens": [1, 5, 1, 3]}


@pytest.mark.parametrize(("heads", "head_dim", "mapped"), [(1, 8, False), (3, 20, True)])
@pytest.mark.parametrize("top_k", [5, 1000])
def test_selected_tokens_equal_the_reference(
    ops: Ops, reference: Ops, dtype: torch.dtype, heads: int, head_dim: int, mapped: bool, top_k: int
) -> None:
    indexed = case(heads, head_dim, dtype, mapped=mapped, **SMALL)
    q, weights, keys = indexed.indexer(exact=True)
    got, expected = (each.selection.select_tokens(q, weights, keys, indexed.paged, top_k) for each in (ops, reference))
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_weights_for_all_tokens_select_as_the_same_weights_for_each(ops: Ops) -> None:
    indexed = case(3, 20, **SMALL)
    q, weights, keys = indexed.indexer(exact=True)
    shared = weights[:1].clone()
    each = shared.expand(weights.shape).contiguous()
    got, expected = (ops.selection.select_tokens(q, some, keys, indexed.paged, 9) for some in (shared, each))
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_selection_by_keys_in_eight_bits_equals_the_reference(ops: Ops, reference: Ops) -> None:
    indexed = case(3, 20, int8=True, **SMALL)
    q, weights, keys = indexed.indexer(exact=True)
    codes, scale = whole(keys.k.shape, torch.int8, 11), torch.full(keys.k.shape[:2], 0.25)
    keys = KvCache(codes, codes, scale, scale)
    ours, theirs = (each.selection.select_tokens(q, weights, keys, indexed.paged, 9)[0] for each in (ops, reference))
    assert_same_bits(ours, theirs)


def test_token_pages_equal_the_reference(ops: Ops, reference: Ops) -> None:
    indexed = case(3, 20, mapped=True, **SMALL)
    q, weights, keys = indexed.indexer(exact=True)
    positions, counts = reference.selection.select_tokens(q, weights, keys, indexed.paged, 9)
    ours, theirs = (each.selection.token_pages(positions, counts, indexed.paged) for each in (ops, reference))
    for name in ("page_table", "rows", "q_start", "seq_lens"):
        assert_same_bits(getattr(ours, name).cpu(), getattr(theirs, name))


@pytest.mark.quick(1)
def test_selections_of_many_tokens_keep_no_sums_of_segments(
    ops: Ops, reference: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = case(3, 20, **SMALL)
    q, weights, keys = indexed.indexer(exact=True)
    pages = reference.selection.token_pages(
        *reference.selection.select_tokens(q, weights, keys, indexed.paged, 9), indexed.paged
    )
    values = KvCache(keys.k, keys.k)
    whole_step = ops.attention.paged_attention(q, values, pages, scale=0.1)
    monkeypatch.setattr(attention, "_PART_BYTES", 0)
    assert_same_bits(ops.attention.paged_attention(q, values, pages, scale=0.1), whole_step)
    assert_close(whole_step, reference.attention.paged_attention(q, values, pages, scale=0.1))


def test_no_tokens_have_no_selection_on_a_gpu(ops: Ops) -> None:
    q, weights, keys = torch.empty(0, 2, 8), torch.empty(0, 2), torch.empty(16, 1, 8)
    positions, counts = ops.selection.select_tokens(q, weights, KvCache(keys, keys), no_sequences(), 5)
    assert (positions.shape, counts.shape) == ((0, 5), (0,))

from __future__ import annotations

import numpy as np
import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(10)

ROWS = [0, 1, 3, 200]
WIDTHS = [1, 16, 97, 576]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_equals_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, weight = normal((rows, width), dtype, seed=1), normal((width,), dtype, seed=2)
    assert_close(native.norms.rms_norm(x, weight, 1e-5), reference.norms.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_inside_a_wider_row(native: NativeOps, reference: Ops, dtype: torch.dtype) -> None:
    heads = normal((9, 10 * 64), dtype, seed=1)[:, 128:448].view(9, 5, 64)
    weight = normal((64,), dtype, seed=2)
    actual = native.norms.rms_norm(heads, weight, 1e-6)
    assert actual.is_contiguous()
    assert_close(actual, reference.norms.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("width", WIDTHS)
def test_match_rms_gives_rows_the_size_of_others(
    native: NativeOps, reference: Ops, dtype: torch.dtype, width: int
) -> None:
    for rows in ROWS:
        x, like = (normal((rows, width + 8), dtype, seed=seed, scale=seed)[:, 8:] for seed in (1, 3))
        matched = native.norms.match_rms(x, like, 1e-5)
        assert matched.is_contiguous()
        assert_close(matched, reference.norms.match_rms(x, like, 1e-5))
    small = torch.full((1, width), 1e-4, dtype=dtype)
    assert_close(native.norms.match_rms(small, torch.ones_like(small), 1e-4), small * 100)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [1, 7, 8, 20, 128, 577])
def test_layer_norm_equals_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, width: int, biased: bool
) -> None:
    weight = normal((width,), dtype, seed=2)
    bias = normal((width,), dtype, seed=3) if biased else None
    for rows in ROWS:
        x = normal((rows, width + 8), dtype, seed=1)[:, :width] + 3
        assert_close(native.norms.layer_norm(x, weight, bias, 1e-6), reference.norms.layer_norm(x, weight, bias, 1e-6))


@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_of_heads_with_weights_of_their_own(
    native: NativeOps, reference: Ops, dtype: torch.dtype, biased: bool
) -> None:
    heads = normal((9, 10 * 20), dtype, seed=1)[:, 40:140].view(9, 5, 20)
    weight = normal((5, 20), dtype, seed=2)
    bias = normal((5, 20), dtype, seed=3) if biased else None
    actual = native.norms.layer_norm(heads, weight, bias, 1e-6)
    assert actual.is_contiguous()
    assert_close(actual, reference.norms.layer_norm(heads, weight, bias, 1e-6))
    of_second = native.norms.layer_norm(heads[:, 1], weight[1], None if bias is None else bias[1], 1e-6)
    assert_same_bits(actual[:, 1], of_second)


def test_layer_norm_does_not_depend_on_other_rows(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    x, weight = normal((200, 576), dtype, seed=1), normal((576,), dtype, seed=2)
    together = native.norms.layer_norm(x, weight, weight, 1e-6)
    assert_same_bits(single_threaded.norms.layer_norm(x, weight, weight, 1e-6), together)
    assert_same_bits(native.norms.layer_norm(x[17:18], weight, weight, 1e-6), together[17:18])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_equals_the_reference_and_adds_in_place(
    native: NativeOps, reference: Ops, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, weight = normal((rows, width), dtype, seed=1), normal((width,), dtype, seed=2)
    ours = normal((rows, width), dtype, seed=3)
    theirs = ours.clone()
    assert_close(
        native.norms.add_rms_norm(x, ours, weight, 1e-5), reference.norms.add_rms_norm(x, theirs, weight, 1e-5)
    )
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("rows", ROWS)
def test_embedding_equals_the_reference(native: NativeOps, reference: Ops, dtype: torch.dtype, rows: int) -> None:
    table = normal((50, 97), dtype, seed=1)
    ids = torch.randint(50, (rows,), generator=torch.Generator().manual_seed(2))
    assert_same_bits(native.linear.embedding(ids, table), reference.linear.embedding(ids, table))


@pytest.mark.parametrize("width", [1, 7, 64, 577])
def test_embedding_widens_bfloat16_exactly(native: NativeOps, reference: Ops, width: int) -> None:
    ids, table = torch.tensor([0, 18, 3, 3]), normal((19, width), torch.bfloat16, seed=1)
    for ops in (native, reference):
        assert_same_bits(ops.linear.embedding(ids, table, torch.float32), table[ids].float())


@pytest.mark.parametrize("width", [1, 7, 16, 50, 4099])
@pytest.mark.parametrize("rows", ROWS)
def test_argmax_rows_equals_the_reference(native: NativeOps, reference: Ops, rows: int, width: int) -> None:
    # Few distinct values, so that most rows have several maxima.
    logits = normal((rows, width), torch.float32, seed=1).round()
    ids, finite = native.sampling.argmax_rows(logits)
    expected_ids, expected_finite = reference.sampling.argmax_rows(logits)
    assert_same_bits(ids, expected_ids)
    assert_same_bits(finite, expected_finite)


@pytest.mark.parametrize("width", [1, 5, 16, 37])
@pytest.mark.parametrize("at", [0, -1])
def test_argmax_flags_rows_that_are_not_finite(each_ops: Ops, width: int, at: int) -> None:
    logits = normal((5, width), torch.float32, seed=1)
    logits[1, at] = NAN
    logits[2, at] = INF
    logits[3] = -INF
    logits[4, 1:] = -INF
    ids, finite = each_ops.sampling.argmax_rows(logits)
    assert finite.tolist() == [True, False, False, False, True]
    assert ids.tolist()[1:] == [0, 0, 0, 0]


@pytest.mark.parametrize("width", [1, 31, 32, 97, 4099])
def test_masked_are_the_columns_whose_bit_is_not_set_in_these_rows_alone(each_ops: Ops, width: int) -> None:
    logits, at = normal((6, width), torch.float32, seed=1), torch.tensor([4, 1, 3])
    logits[:, ::5], before = NAN, logits
    may = torch.rand(3, -(-width // 32) * 32, generator=torch.Generator().manual_seed(2)) < 0.3
    may[0], may[1, :64] = True, False
    words = np.packbits(may.numpy(), axis=1, bitorder="little").view(np.int32)
    masked = before.clone()
    each_ops.sampling.mask_logits(masked, at, torch.from_numpy(words))
    expected = before.clone()
    for row, allowed in zip(at.tolist(), may, strict=True):
        expected[row, ~allowed[:width]] = -INF
    assert_same_bits(masked.view(torch.int32), expected.view(torch.int32))


def test_rowwise_ops_do_not_depend_on_the_other_rows_or_threads(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    x, weight = normal((200, 576), dtype, seed=1), normal((576,), dtype, seed=2)
    together = native.norms.rms_norm(x, weight, 1e-5)
    assert_same_bits(single_threaded.norms.rms_norm(x, weight, 1e-5), together)
    assert_same_bits(native.norms.rms_norm(x[17:18], weight, 1e-5), together[17:18])

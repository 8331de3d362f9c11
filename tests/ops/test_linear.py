from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(16)

# rows, inputs, outputs: none, one, below, at and above a tile, and nothing a multiple of anything
SHAPES = [
    (0, 64, 64),
    (1, 1, 1),
    (1, 97, 131),
    (5, 97, 131),
    (16, 64, 32),
    (17, 64, 33),
    (40, 96, 960),
    (300, 97, 65),
]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_the_reference(
    native: NativeOps,
    reference: Ops,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
) -> None:
    x = normal((rows, inputs), dtype, seed=1)
    weight = normal((outputs, inputs), dtype, seed=2, scale=inputs**-0.5)
    bias = normal((outputs,), dtype, seed=3) if with_bias else None
    ours, theirs = native.linear.pack(weight, bias), reference.linear.pack(weight, bias)
    assert (ours.in_features, ours.out_features) == (inputs, outputs)
    assert_close(native.linear.apply(x, ours), reference.linear.apply(x, theirs))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear_of_float32_by_bfloat16_has_the_bits_of_the_widened_weight(
    native: NativeOps, reference: Ops, rows: int, inputs: int, outputs: int
) -> None:
    x, weight = normal((rows, inputs), torch.float32, seed=1), normal((outputs, inputs), torch.bfloat16, seed=2)
    bias = normal((outputs,), torch.float32, seed=3)
    for ops in (native, reference):
        packed = ops.linear.pack(weight, bias, inputs=torch.float32)
        widened = ops.linear.pack(weight.float(), bias)
        for multiply in (ops.linear.apply, ops.linear.apply_f32):
            found = multiply(x, packed)
            assert found.dtype == torch.float32
            assert_same_bits(found, multiply(x, widened))


def test_linear_f32_returns_sums_that_were_not_rounded(native: NativeOps, dtype: torch.dtype) -> None:
    x, weight = normal((7, 200), dtype, seed=1), normal((50, 200), dtype, seed=2, scale=0.1)
    logits = native.linear.apply_f32(x, native.linear.pack(weight))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_packed_weight_outlives_the_original(native: NativeOps, dtype: torch.dtype) -> None:
    x, weight = normal((3, 40), dtype, seed=1), normal((20, 40), dtype, seed=2)
    packed = native.linear.pack(weight)
    before = native.linear.apply(x, packed)
    weight.fill_(float("nan"))
    assert_same_bits(native.linear.apply(x, packed), before)


def test_linear_reads_views_into_wider_rows(native: NativeOps, dtype: torch.dtype) -> None:
    wide = normal((20, 100), dtype, seed=1)
    packed = native.linear.pack(normal((30, 64), dtype, seed=2))
    assert_same_bits(
        native.linear.apply(wide[:, 10:74], packed), native.linear.apply(wide[:, 10:74].contiguous(), packed)
    )


@pytest.mark.parametrize("inputs", [64, 97])
def test_a_row_does_not_depend_on_how_many_rows_come_with_it(
    native: NativeOps, dtype: torch.dtype, inputs: int
) -> None:
    x = normal((70, inputs), dtype, seed=1)
    packed = native.linear.pack(normal((131, inputs), dtype, seed=2))
    together = native.linear.apply_f32(x, packed)
    for rows in (1, 2, 15, 16, 17, 31, 33, 69):
        assert_same_bits(native.linear.apply_f32(x[-rows:], packed), together[-rows:])


def test_linear_does_not_depend_on_the_number_of_threads(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    x, weight = normal((600, 96), dtype, seed=1), normal((500, 96), dtype, seed=2)
    assert_same_bits(
        native.linear.apply_f32(x, native.linear.pack(weight)),
        single_threaded.linear.apply_f32(x, single_threaded.linear.pack(weight)),
    )


def test_a_row_of_nan_stays_a_row_of_nan(native: NativeOps, dtype: torch.dtype) -> None:
    x = normal((40, 64), dtype, seed=1)
    packed = native.linear.pack(normal((33, 64), dtype, seed=2))
    clean = native.linear.apply(x, packed)
    x[7] = float("nan")
    poisoned = native.linear.apply(x, packed)
    assert poisoned[7].isnan().all()
    live = torch.arange(40) != 7
    assert_same_bits(poisoned[live], clean[live])

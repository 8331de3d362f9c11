"""The kernel that makes codes of rows of numbers equals its definition in `formats/quantize.py`, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.base.errors import ModelError
from forebay.formats.file_array import Array
from forebay.formats.held_format import QUANTIZED_FORMATS
from forebay.formats.quantize import quantize_into, unwritten
from forebay.formats.quantized import GROUP, GroupQuantized
from forebay.ops.native.ops import NativeOps

pytestmark = pytest.mark.quick(10)

DTYPES = ("float32", "float16", "bfloat16")
SHAPES = [(0, 64), (1, 32), (3, 96), (7, 32), (160, 1536), (2, 4096)]


def as_stored(values: Array, dtype: str) -> Array:
    """Values of float32 as a checkpoint has them, bits of bfloat16 cut off."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def both(native: NativeOps, values: Array, bits: int) -> tuple[GroupQuantized, GroupQuantized]:
    """What the kernel makes of the values, and the definition; behind a row that neither may touch."""
    found = []
    for function in (native.linear.quantize_into, quantize_into):
        out = unwritten(QUANTIZED_FORMATS[bits], len(values) + 1, values.shape[1])
        for part in (out.codes, out.scales, out.minimums):
            if part is not None:
                part[:] = 77
        function(values, out, 1)
        found.append(out)
    return found[0], found[1]


def assert_equal(found: tuple[GroupQuantized, GroupQuantized]) -> None:
    ours, right = found
    np.testing.assert_array_equal(ours.codes, right.codes)
    for mine, theirs in ((ours.scales, right.scales), (ours.minimums, right.minimums)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            np.testing.assert_array_equal(mine.view(np.uint16), theirs.view(np.uint16))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_random_rows_equal_the_definition(
    shape: tuple[int, int], dtype: str, bits: int, native: NativeOps
) -> None:
    values = np.random.default_rng(shape[0]).normal(size=shape).astype(np.float32)
    values *= np.exp2(np.random.default_rng(1).integers(-30, 9, size=(shape[0], 1))).astype(np.float32)
    assert_equal(both(native, as_stored(values, dtype), bits))


def special_groups() -> Array:
    """Groups with ties, zeros of both signs, one value, steps that are no normal float16, and the largest there are."""
    halves = np.arange(GROUP) / 2
    ramp = np.linspace(-1, 1, GROUP)
    groups = [halves, -halves, halves * 0, halves * -0.0, np.where(ramp < 0, -0.0, 0.0), ramp * 0 + 3, ramp * 0 - 3]
    groups += [ramp * 2.0**-power for power in (15, 22, 24, 25, 26, 60, 120, 140, 149)]
    groups += [ramp * 65504, ramp * 65504 * 7, np.abs(ramp) * 65504 * 15, ramp + 1e4, ramp + 3e-5]
    groups += [np.where(np.arange(GROUP) == 5, 1.0, 1.0 + 2.0**-12)]
    return np.array(groups, np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantize_special_groups_equal_the_definition(dtype: str, bits: int, native: NativeOps) -> None:
    groups = as_stored(special_groups(), dtype)
    for group in groups:
        values = group[None]
        try:
            expected = both(native, values, bits)
        except ModelError:
            with pytest.raises(ModelError, match="beyond float16"):
                native.linear.quantize_into(values, unwritten(QUANTIZED_FORMATS[bits], 1, GROUP), 0)
            with pytest.raises(ModelError, match="beyond float16"):
                quantize_into(values, unwritten(QUANTIZED_FORMATS[bits], 1, GROUP), 0)
        else:
            assert_equal(expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_zeros_of_both_signs_have_no_negative_zero(dtype: str, bits: int, native: NativeOps) -> None:
    """Which of two zeros is the largest depends on the CPU, in numpy as in our kernels."""
    signs = np.random.default_rng(0).integers(0, 2, size=(64, GROUP)) * 2 - 1
    zeros = np.concatenate([signs * 0.0, np.full((1, GROUP), -0.0), np.zeros((1, GROUP))]).astype(np.float32)
    found = both(native, as_stored(zeros, dtype), bits)
    assert_equal(found)
    for part in (found[1].scales, found[1].minimums):
        assert part is None or not part.view(np.uint16)[1:].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_every_float16_as_a_scale_equals_the_definition(bits: int, native: NativeOps) -> None:
    """Also numbers half-way between two of float16."""
    steps = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (steps[1:].astype(np.float64) + steps[:-1]) / 2
    ends = np.concatenate([steps, between.astype(np.float32)]) * np.float32(15 if bits == 4 else 127)
    values = np.zeros((len(ends), GROUP), np.float32)
    values[:, 7] = ends
    assert_equal(both(native, values[values[:, 7] <= np.float32(65504)], bits))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_quantize_value_that_is_not_finite_is_refused_wherever_it_is(
    value: float, dtype: str, bits: int, native: NativeOps
) -> None:
    for at in (0, 31, 33, 64, 95):
        values = np.ones((40, 96), np.float32)
        values[at % 40, at] = value
        with pytest.raises(ModelError, match="beyond float16"):
            native.linear.quantize_into(as_stored(values, dtype), unwritten(QUANTIZED_FORMATS[bits], 40, 96), 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_rows_at_any_byte_equal_the_definition(bits: int, native: NativeOps) -> None:
    """Memory into which a file is read begins anywhere."""
    numbers = np.random.default_rng(3).normal(size=(8, 96)).astype(np.float32)
    for offset in range(4):
        memory = np.zeros(numbers.nbytes + 4, np.uint8)
        values = memory[offset : offset + numbers.nbytes].view(np.float32).reshape(numbers.shape)
        values[:] = numbers
        assert_equal(both(native, values, bits))

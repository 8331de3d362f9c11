from __future__ import annotations

import numpy as np
import pytest

from forebay.base.errors import ModelError
from forebay.formats.held_format import QUANTIZED_FORMATS
from forebay.formats.quantize import quantize_rows
from forebay.formats.quantized import GROUP


@pytest.mark.parametrize("bits", [4, 8])
def test_no_value_moves_by_more_than_half_a_step(bits: int) -> None:
    values = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    weight = quantize_rows(values, bits)
    assert weight.shape == values.shape
    assert weight.format == QUANTIZED_FORMATS[bits]
    # The scale's own rounding to float16 moves the ends of the range by up to 2^-11 of it.
    step = np.repeat(weight.scales.astype(np.float32), GROUP, axis=1)
    assert (np.abs(weight.values() - values) <= step * (0.5 + 2.0**-11 * (1 << bits))).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_values_that_codes_stand_for_stay_as_they_are(bits: int) -> None:
    values = quantize_rows(np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32), bits).values()
    np.testing.assert_allclose(quantize_rows(values, bits).values(), values, rtol=0, atol=2e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1e-30, 0.25])
def test_a_group_of_one_value_is_that_value(bits: int, value: float) -> None:
    values = np.full((2, GROUP), value, dtype=np.float32)
    np.testing.assert_allclose(quantize_rows(values, bits).values(), values, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_rows_give_no_codes(bits: int) -> None:
    assert quantize_rows(np.zeros((0, 64), dtype=np.float32), bits).shape == (0, 64)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_what_float16_cannot_scale_is_refused(bits: int, value: float) -> None:
    values = np.zeros((2, GROUP), dtype=np.float32)
    values[1, 3] = value
    with pytest.raises(ModelError, match="beyond float16"):
        quantize_rows(values, bits)

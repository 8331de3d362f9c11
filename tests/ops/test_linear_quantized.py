from __future__ import annotations

import numpy as np
import pytest
import torch

from forebay.formats.quantized import CodeFormat
from forebay.formats.small_floats import E2M1
from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from tests.formats.coded import FORMATS, random_codes, stored
from tests.kernels import VARIANTS, named, native_ops
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(16)

# rows, inputs, outputs: none, one, below, at and above a tile and a panel
SHAPES = [(0, 64, 64), (1, 32, 1), (1, 96, 131), (5, 96, 131), (16, 64, 32), (17, 64, 33), (40, 96, 960), (300, 96, 65)]


@pytest.fixture(scope="session", params=[8, 16], ids=["8 bits", "16 bits"])
def activation_bits(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="session")
def native(native: NativeOps, activation_bits: int) -> NativeOps:
    return rounding(native, activation_bits, native.num_threads)


@pytest.fixture(scope="session")
def single_threaded(native: NativeOps) -> NativeOps:
    return rounding(native, native.activation_bits, 1)


def rounding(ops: NativeOps, activation_bits: int, num_threads: int) -> NativeOps:
    return native_ops(named(ops.name), num_threads, activation_bits)


# One of each kind: without minimums and with, of planes of one bit and two, with levels, with scales of each type.
FEW = ("Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4", "FP8 by 128", "NVFP4")


@pytest.fixture(params=[FORMATS[name] for name in FEW], ids=FEW)
def form(request: pytest.FixtureRequest) -> CodeFormat:
    return request.param


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The native ops' numbers are within 2^-16 of a scale, see cpu/linear_q.h."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    else:
        assert_close(actual, expected)


def whole(inputs: int, form: CodeFormat) -> int:
    """At least so many, in groups of the format."""
    return -(-inputs // form.group) * form.group


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_linear_equals_the_reference(native: NativeOps, reference: Ops, dtype: torch.dtype, form: CodeFormat) -> None:
    for rows, least, outputs in SHAPES:
        inputs = whole(least, form)
        x, weight = normal((rows, inputs), dtype, seed=1), stored(random_codes(form, outputs, inputs, seed=2))
        for bias in (None, normal((outputs,), dtype, seed=3)):
            ours, theirs = native.linear.pack_quantized(weight, bias), reference.linear.pack_quantized(weight, bias)
            assert (ours.in_features, ours.out_features) == (inputs, outputs)
            assert (theirs.in_features, theirs.out_features) == (inputs, outputs)
            assert_near(native.linear.apply(x, ours), reference.linear.apply(x, theirs))


def test_formats_one_below_the_other_give_the_bits_of_each(native: NativeOps, dtype: torch.dtype) -> None:
    """As in files where some of the matrices that run as one have more bits."""
    parts = [
        random_codes(FORMATS[name], outputs, 512, seed=outputs)
        for name, outputs in (("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 96), ("Q8_0", 40))
    ]
    together = native.linear.pack_quantized(stored(*parts))
    for rows in (1, 9):
        x = normal((rows, 512), dtype, seed=rows)
        expected = [native.linear.apply_f32(x, native.linear.pack_quantized(stored(part))) for part in parts]
        assert_same_bits(native.linear.apply_f32(x, together), torch.cat(expected, dim=1))
    ids = torch.tensor([0, 63, 95, 96, 191, 192, 231])
    values = torch.from_numpy(np.concatenate([part.values() for part in parts]))
    assert_near(native.linear.embedding_packed(ids, together, dtype), values[ids].to(dtype))


@pytest.mark.parametrize("activation_bits", [16], ids=["16 bits"], indirect=True)  # AMX rounds to none, or is not there
def test_linear_gives_the_bits_of_the_numbers_that_the_codes_stand_for(
    native: NativeOps, dtype: torch.dtype, form: CodeFormat
) -> None:
    if native.activation_bits:
        pytest.skip("multiplies the codes themselves")
    width = whole(160, form)
    packed = native.linear.pack_quantized(stored(random_codes(form, 131, width, seed=2)))
    opened = native.linear.pack(native.linear.embedding_packed(torch.arange(131), packed, dtype))
    for rows in (1, 5, 16, 17, 33, 200):
        x = normal((rows, width), dtype, seed=rows)
        assert_same_bits(native.linear.apply(x, packed), native.linear.apply(x, opened))


def test_a_row_does_not_depend_on_how_many_rows_come_with_it(
    native: NativeOps, dtype: torch.dtype, form: CodeFormat
) -> None:
    width = whole(160, form)
    x, packed = (
        normal((200, width), dtype, seed=1),
        native.linear.pack_quantized(stored(random_codes(form, 131, width, seed=2))),
    )
    together = native.linear.apply_f32(x, packed)
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 199):
        assert_same_bits(native.linear.apply_f32(x[-rows:], packed), together[-rows:])


@pytest.mark.quick(8)
def test_linear_does_not_depend_on_the_number_of_threads(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype, form: CodeFormat
) -> None:
    width = whole(96, form)
    weight = stored(random_codes(form, 500, width, seed=2))
    ours, theirs = native.linear.pack_quantized(weight), single_threaded.linear.pack_quantized(weight)
    for rows in (1, 3, 600):
        x = normal((rows, width), dtype, seed=rows)
        assert_same_bits(native.linear.apply_f32(x, ours), single_threaded.linear.apply_f32(x, theirs))


def test_packed_weight_outlives_the_original(native: NativeOps, form: CodeFormat) -> None:
    width = whole(64, form)
    x, weight = normal((3, width), torch.float32, seed=1), random_codes(form, 20, width, seed=2)
    packed = native.linear.pack_quantized(stored(weight))
    before = native.linear.apply(x, packed)
    weight.codes.fill(0)
    weight.scales.view(np.uint8).fill(0xFF)  # NaN in every type
    assert_same_bits(native.linear.apply(x, packed), before)


def test_linear_reads_views_into_wider_rows(native: NativeOps, dtype: torch.dtype) -> None:
    wide = normal((20, 100), dtype, seed=1)
    packed = native.linear.pack_quantized(stored(random_codes(FORMATS["Q4_1"], 30, 64, seed=2)))
    for rows in (1, 20):
        view = wide[:rows, 10:74]
        assert_same_bits(native.linear.apply(view, packed), native.linear.apply(view.contiguous(), packed))


def test_a_row_of_nan_stays_a_row_of_nan(native: NativeOps, dtype: torch.dtype, form: CodeFormat) -> None:
    width = whole(64, form)
    x, packed = (
        normal((40, width), dtype, seed=1),
        native.linear.pack_quantized(stored(random_codes(form, 33, width, seed=2))),
    )
    clean = native.linear.apply(x, packed)
    x[7] = float("nan")
    poisoned = native.linear.apply(x, packed)
    assert poisoned[7].isnan().all()
    live = torch.arange(40) != 7
    assert_same_bits(poisoned[live], clean[live])


def test_embedding_returns_the_numbers_that_the_codes_stand_for(
    each_ops: NativeOps | Ops, dtype: torch.dtype, form: CodeFormat
) -> None:
    width = whole(96, form)
    weight = random_codes(form, 70, width, seed=1)
    table = each_ops.linear.pack_quantized(stored(weight))
    ids = torch.tensor([0, 69, 33, 33, 15, 16, 31, 32])
    assert_near(each_ops.linear.embedding_packed(ids, table, dtype), torch.from_numpy(weight.values())[ids].to(dtype))
    assert each_ops.linear.embedding_packed(ids[:0], table, dtype).shape == (0, width)


def test_every_instruction_set_opens_the_same_numbers(native: NativeOps, dtype: torch.dtype, form: CodeFormat) -> None:
    best = native_ops(VARIANTS[0], 2)
    weight, ids = stored(random_codes(form, 70, whole(96, form), seed=1)), torch.arange(70)
    ours, theirs = native.linear.pack_quantized(weight), best.linear.pack_quantized(weight)
    assert_same_bits(native.linear.embedding_packed(ids, ours, dtype), best.linear.embedding_packed(ids, theirs, dtype))


def test_powers_of_two_as_scales_are_exact_from_the_least_to_the_largest(each_ops: NativeOps | Ops) -> None:
    weight = random_codes(FORMATS["MXFP4"], 32, 8 * 32, seed=1)
    weight.scales[:] = np.resize(np.array([0, 1, 2, 3, 126, 127, 128, 252], np.uint8), weight.scales.shape)
    table = each_ops.linear.pack_quantized(stored(weight))
    expected = np.ldexp(E2M1[weight.codes], weight.scales.repeat(32, axis=1).astype(np.int32) - 127)
    assert_same_bits(
        each_ops.linear.embedding_packed(torch.arange(32), table, torch.float32), torch.from_numpy(expected)
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "FP8"])
@pytest.mark.parametrize("x", [1.0, -1.0])
def test_sums_of_the_largest_codes_do_not_overflow(native: NativeOps, reference: Ops, name: str, x: float) -> None:
    form = FORMATS[name]
    weight = random_codes(form, 33, whole(64, form), seed=1)
    weight.codes[:] = {"MXFP4": 7, "NVFP4": 7, "FP8": 0x7E}.get(name, (1 << form.bits) - 1)
    rows = torch.full((5, weight.shape[1]), x)
    actual = native.linear.apply(rows, native.linear.pack_quantized(stored(weight)))
    expected = reference.linear.apply(rows, reference.linear.pack_quantized(stored(weight)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

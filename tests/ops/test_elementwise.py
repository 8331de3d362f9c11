"""What is added, scaled, gated and joined around the layers; activations have tests of their own."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(10)

ROWS = [0, 1, 3, 200]
WIDTHS = [1, 16, 97, 576]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_and_scales_in_place_equal_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, rows: int, width: int
) -> None:
    ours, y = normal((rows, width), dtype, seed=1), normal((rows, width + 5), dtype, seed=2)[:, 5:]
    theirs = ours.clone()
    assert native.elementwise.add_(ours, y) is ours
    assert_same_bits(ours, reference.elementwise.add_(theirs, y))
    assert native.elementwise.scale_(ours, 0.37) is ours
    assert_same_bits(ours, reference.elementwise.scale_(theirs, 0.37))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_narrow_float32_equals_the_reference_and_keeps_what_is_narrow(
    native: NativeOps, reference: Ops, rows: int, width: int
) -> None:
    x = normal((rows, width), torch.float32, seed=1)
    assert_same_bits(native.elementwise.narrow(x, torch.bfloat16), reference.elementwise.narrow(x, torch.bfloat16))
    for dtype in (torch.float32, torch.bfloat16):
        own = x.to(dtype)
        assert native.elementwise.narrow(own, dtype) is own
        assert reference.elementwise.narrow(own, dtype) is own


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_scale_rows_views_of_wider_rows_equals_the_reference_and_leaves_the_rest(
    native: NativeOps, reference: Ops, dtype: torch.dtype, rows: int, width: int
) -> None:
    ours, table = normal((rows, width + 7), dtype, seed=1), normal((9,), torch.float32, seed=2)
    before, theirs, at = ours.clone(), ours.clone(), torch.arange(rows) * 5 % 9
    part = ours[:, 3 : 3 + width]
    assert native.elementwise.scale_rows_(part, table, at) is part
    reference.elementwise.scale_rows_(theirs[:, 3 : 3 + width], table, at)
    assert_same_bits(ours, theirs)
    expected = (before.float() * table[at].unsqueeze(1)).to(dtype)
    assert_same_bits(ours[:, 3 : 3 + width], expected[:, 3 : 3 + width])
    assert_same_bits(ours[:, :3], before[:, :3])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_cap_equals_the_reference_and_lets_nothing_infinite_pass(
    native: NativeOps, reference: Ops, rows: int, width: int
) -> None:
    x = normal((rows, width), torch.float32, seed=1, scale=40)
    for row, value in enumerate((float("inf"), float("-inf"), float("nan"))[:rows]):
        x[row, row % width] = value
    ours, theirs = x.clone(), x.clone()
    assert native.elementwise.softcap_(ours, 30.0) is ours
    finite = x.isfinite()
    for capped in (ours, reference.elementwise.softcap_(theirs, 30.0)):
        assert torch.equal(capped.isnan(), ~finite)
    assert_close(ours[finite], theirs[finite])
    assert (ours[finite].abs() <= 30.0).all()


@pytest.mark.parametrize("factor", [1.0, 1.0 + 2.0**-8, 1.2345678e-3, 3e38])
def test_every_instruction_set_rounds_to_bfloat16_alike(native: NativeOps, factor: float) -> None:
    """To nearest even; a NaN keeps its sign; what is no normal number is a zero of its sign."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).reshape(1, -1)
    bits = (x.float() * factor).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(magnitude > 0x7F800000, (bits | 0x400000) >> 16, rounded)
    rounded = torch.where(magnitude < 0x800000, (bits >> 16) & -0x8000, rounded)
    assert torch.equal(native.elementwise.scale_(x.clone(), factor).view(torch.int16), rounded.to(torch.int16))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("gates", "width"), [(1, 1), (1, 48), (3, 48), (4, 92), (48, 48)])
def test_a_gate_may_be_shared_by_entries_side_by_side(
    native: NativeOps, reference: Ops, dtype: torch.dtype, rows: int, gates: int, width: int
) -> None:
    wide = normal((rows, width + gates), dtype, seed=1)
    x, gate = wide[:, :width], wide[:, width:]
    actual = native.elementwise.mul_sigmoid(x, gate)
    assert_close(actual, reference.elementwise.mul_sigmoid(x, gate))
    assert_same_bits(actual, native.elementwise.mul_sigmoid(x, gate.repeat_interleave(width // gates, dim=1)))


@pytest.mark.parametrize("rows", ROWS)
def test_parts_are_joined_behind_each_other(each_ops: Ops, dtype: torch.dtype, rows: int) -> None:
    wide = normal((rows, 60), dtype, seed=1)
    flat = [wide[:, 3:20], wide[:, 40:41], normal((rows, 9), dtype, seed=2)]
    heads = [normal((rows, 4, 7), dtype, seed=3), wide[:, 20:40].view(rows, 4, 5), wide[:, :12].view(rows, 4, 3)]
    for parts in (flat, heads, flat[:1]):
        joined = each_ops.elementwise.concat(parts)
        assert joined.is_contiguous()
        assert_same_bits(joined, torch.cat(parts, dim=-1))


@pytest.mark.parametrize("rows", ROWS)
def test_zeros_take_shape_and_dtype_of_a_view(each_ops: Ops, dtype: torch.dtype, rows: int) -> None:
    zeros = each_ops.elementwise.zeros_like(normal((rows, 40), dtype, seed=1)[:, 7:30])
    assert zeros.is_contiguous()
    assert_same_bits(zeros, torch.zeros(rows, 23, dtype=dtype))


def test_rows_and_threads_do_not_matter(native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype) -> None:
    x, y = (normal((200, 575), dtype, seed=seed) for seed in (1, 2))
    for name in ("add_", "mul_sigmoid"):
        together = getattr(native.elementwise, name)(x.clone(), y)
        assert_same_bits(getattr(single_threaded.elementwise, name)(x.clone(), y), together)
        assert_same_bits(getattr(native.elementwise, name)(x[17:18].clone(), y[17:18]), together[17:18])
    assert_same_bits(
        native.elementwise.scale_(x.clone(), 0.3)[17:18], single_threaded.elementwise.scale_(x[17:18].clone(), 0.3)
    )

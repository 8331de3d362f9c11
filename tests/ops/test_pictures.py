"""The ops of pictures: patches as rows of numbers, and rows of encodings instead of embeddings."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.pictures import PixelScale
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(10)

SCALE = PixelScale(torch.tensor([0.01, 0.02, 0.03]), torch.tensor([-0.5, -0.6, -0.7]))


def pixels(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(1)).byte()


@pytest.mark.parametrize(("height", "width", "size"), [(32, 48, 16), (7, 9, 3), (5, 4, 1), (20, 41, 20), (3, 3, 4)])
def test_patch_rows_equals_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, height: int, width: int, size: int
) -> None:
    """Some with pixels that fill no patch, some with no patch at all."""
    tile = pixels(height, width)
    assert_same_bits(
        native.pictures.patch_rows(tile, size, SCALE, dtype), reference.pictures.patch_rows(tile, size, SCALE, dtype)
    )


@pytest.mark.parametrize(("height", "width", "size"), [(32, 48, 16), (29, 30, 14)])
def test_linear_layer_over_patch_rows_equals_a_convolution(each_ops: Ops, height: int, width: int, size: int) -> None:
    tile, kernel = pixels(height, width), normal((5, 3, size, size), torch.float32, seed=1, scale=0.1)
    numbers = (tile.float() * SCALE.factor + SCALE.shift).permute(2, 0, 1).unsqueeze(0)
    expected = torch.nn.functional.conv2d(numbers, kernel, stride=size)[0].flatten(1).T
    assert_close(each_ops.pictures.patch_rows(tile, size, SCALE, torch.float32) @ kernel.flatten(1).T, expected)


@pytest.mark.parametrize(("tokens", "count", "width"), [(5, 4, 37), (3, 1, 16), (0, 9, 8), (40, 16, 64)])
def test_mean_rows_is_the_mean_in_float32_of_rows_that_follow_each_other(
    each_ops: Ops, reference: Ops, dtype: torch.dtype, tokens: int, count: int, width: int
) -> None:
    x = normal((tokens * count, width), dtype, seed=3)
    assert_same_bits(each_ops.pictures.mean_rows(x, count), reference.pictures.mean_rows(x, count))
    assert_close(each_ops.pictures.mean_rows(x, count), x.view(tokens, count, width).float().mean(dim=1).to(dtype))


@pytest.mark.parametrize(("rows", "width"), [([], 16), ([0], 1), ([3], 7), ([0, 4, 2, 0, 4, 0], 97)])
def test_replace_rows_takes_what_is_named_and_leaves_the_rest(
    each_ops: Ops, dtype: torch.dtype, rows: list[int], width: int
) -> None:
    """Nothing of the padding row, whatever it holds."""
    x, table = normal((len(rows), width), dtype, seed=1), normal((5, width), dtype, seed=2)
    table[0] = float("nan")
    before = x.clone()
    assert each_ops.pictures.replace_rows_(x, table, torch.tensor(rows, dtype=torch.int32)) is x
    for t, row in enumerate(rows):
        assert_same_bits(x[t], table[row] if row else before[t])


@pytest.mark.parametrize(("rows", "width"), [([], 16), ([0], 1), ([3], 7), ([0, 4, 2, 0, 4, 0], 97)])
def test_rows_of_a_part_of_wider_rows_are_taken_and_added(
    each_ops: Ops, dtype: torch.dtype, rows: list[int], width: int
) -> None:
    """Nothing of the padding row, whatever it holds."""
    wide = normal((5, 3 * width), dtype, seed=2)
    wide[0] = float("nan")
    table, at = wide[:, width : 2 * width], torch.tensor(rows, dtype=torch.int32)
    taken, added = (normal((len(rows), width), dtype, seed=1) for _ in range(2))
    before = taken.clone()
    assert each_ops.pictures.replace_rows_(taken, table, at) is taken
    assert each_ops.pictures.add_rows_(added, table, at) is added
    for t, row in enumerate(rows):
        assert_same_bits(taken[t], table[row] if row else before[t])
        assert_same_bits(added[t], (before[t].float() + table[row].float()).to(dtype) if row else before[t])

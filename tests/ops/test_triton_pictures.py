"""Triton's kernels of pictures equal the reference."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from tests.ops.helpers import assert_close, assert_same_bits, normal
from tests.ops.triton_device import ON_EACH_DEVICE, OnDevice, TritonOps


@pytest.fixture(scope="module", params=ON_EACH_DEVICE)
def ops(request: pytest.FixtureRequest) -> OnDevice:
    return OnDevice(TritonOps(request.param, 1), request.param)


@pytest.mark.parametrize(("rows", "width"), [([], 16), ([3], 7), ([0, 4, 2, 0], 1100)])
def test_replace_rows_equals_the_reference_in_place(ops: Ops, dtype: torch.dtype, rows: list[int], width: int) -> None:
    ours, table = normal((len(rows), width), dtype, seed=1), normal((5, width), dtype, seed=2)
    table[0] = float("nan")
    theirs, at = ours.clone(), torch.tensor(rows, dtype=torch.int32)
    ops.pictures.replace_rows_(ours, table, at)
    assert_same_bits(ours, Ops(1).pictures.replace_rows_(theirs, table, at))


@pytest.mark.parametrize(("rows", "width"), [([], 16), ([3], 7), ([0, 4, 2, 0], 1100)])
def test_add_rows_of_wider_ones_equals_the_reference_in_place(
    ops: Ops, dtype: torch.dtype, rows: list[int], width: int
) -> None:
    ours, wide = normal((len(rows), width), dtype, seed=1), normal((5, 2 * width), dtype, seed=2)
    wide[0] = float("nan")
    theirs, at, table = ours.clone(), torch.tensor(rows, dtype=torch.int32), wide[:, width:]
    ops.pictures.add_rows_(ours, table, at)
    assert_close(ours, Ops(1).pictures.add_rows_(theirs, table, at))

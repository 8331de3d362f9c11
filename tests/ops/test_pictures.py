"""The ops of pictures: rows of encodings instead of embeddings."""

from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from tests.ops.helpers import assert_same_bits, normal


@pytest.mark.parametrize(("rows", "width"), [([], 16), ([0], 1), ([3], 7), ([0, 4, 2, 0, 4, 0], 97)])
def test_replace_rows_takes_what_is_named_and_leaves_the_rest(
    each_ops: Ops, dtype: torch.dtype, rows: list[int], width: int
) -> None:
    """Nothing of the padding row, whatever it holds."""
    x, table = normal((len(rows), width), dtype, seed=1), normal((5, width), dtype, seed=2)
    table[0] = float("nan")
    before = x.clone()
    assert each_ops.replace_rows_(x, table, torch.tensor(rows, dtype=torch.int32)) is x
    for t, row in enumerate(rows):
        assert_same_bits(x[t], table[row] if row else before[t])

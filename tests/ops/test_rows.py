"""What a replayed step does to rows without torch: last tokens by row."""

from __future__ import annotations

import pytest
import torch

from forebay.ops import Ops


@pytest.mark.parametrize("rows", [[], [3], [2, 5, 1], [0, 4, 0]])
def test_tokens_are_read_and_written_by_row(each_ops: Ops, rows: list[int]):
    table, which = torch.arange(7) * 10, torch.tensor(rows, dtype=torch.int32)
    assert each_ops.gather(table, which).tolist() == [10 * row for row in rows]
    each_ops.scatter(table, which, torch.arange(len(rows)) + 100)
    for row in range(7):
        written = [100 + i for i, other in enumerate(rows) if other == row]
        assert int(table[row]) in (written or [10 * row])

"""What a replayed step does to rows without torch: last tokens by row, and where its sequences begin."""

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


@pytest.mark.parametrize(
    ("ends", "lens", "num_tokens", "starts", "bounded"),
    [
        ([], [], 4, [0], []),
        ([4], [9], 4, [0, 4], [9]),
        ([2, 5, 6], [2, 30, 1], 6, [0, 2, 5, 6], [2, 30, 1]),
        # Padded sequences: one has the tokens that are left, and is as long; the others have none.
        ([2, 5, 2**31 - 1, 2**31 - 1], [7, 3, 1, 1], 16, [0, 2, 5, 16, 16], [7, 3, 11, 1]),
    ],
)
def test_sequences_begin_where_the_one_before_ends_and_are_not_shorter_than_their_queries(
    each_ops: Ops, ends, lens, num_tokens, starts, bounded
):
    found = each_ops.query_bounds(
        torch.tensor(ends, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), num_tokens
    )
    assert [tensor.tolist() for tensor in found] == [starts, bounded]
    assert {tensor.dtype for tensor in found} == {torch.int32}

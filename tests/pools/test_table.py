from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.pools.request_rows import RequestRows, SamplingRows
from forebay.pools.table import Column, Table


class Things(Table):
    count = Column(torch.int64, pad=-1)
    share = Column(torch.float32, ("W", 2), pad=0.5)
    flag = Column(torch.bool, pad=False)


ROWS = 6


def things() -> Things:
    return Things(ROWS, sizes={"W": 3})


def scribbled() -> Things:
    table = things()
    table.count.copy_(torch.arange(ROWS) + 100)
    table.share.fill_(7.0)
    table.flag.fill_(True)
    return table


def assert_padded(table: Things, rows: slice) -> None:
    assert (table.count[rows] == -1).all()
    assert (table.share[rows] == 0.5).all()
    assert not table.flag[rows].any()


def test_a_table_is_all_pads_at_first_with_the_declared_shapes_and_types():
    table = things()
    assert_padded(table, slice(None))
    assert table.share.shape == (ROWS, 3, 2)
    assert (table.count.dtype, table.flag.dtype) == (torch.int64, torch.bool)
    assert table["share"] is table.share


@given(n=st.integers(0, ROWS), extra=st.integers(0, ROWS))
def test_fill_writes_values_pads_the_tail_and_pads_whole_what_has_no_values(n, extra):
    """C13: nothing of an earlier step is left in the rows of this one, and no row behind them is touched."""
    padded = min(ROWS, n + extra)
    table = scribbled()
    table.fill({"count": torch.arange(n)}, n, padded)
    view = table.head(padded)
    assert view.count[:n].tolist() == list(range(n))
    assert (view.count[n:] == -1).all()
    assert (view.share == 0.5).all()
    assert not view.flag.any()
    assert table.count[padded:].tolist() == list(range(100 + padded, 100 + ROWS))
    assert (table.share[padded:] == 7.0).all()


def test_fill_refuses_values_for_a_column_that_is_not_there():
    table = scribbled()
    with pytest.raises(KeyError, match="counts"):
        table.fill({"counts": torch.zeros(1)}, 1, 2)
    assert table.count[0] == 100


def test_fill_refuses_fewer_values_than_rows():
    """One value for many rows would otherwise be taken for all of them."""
    with pytest.raises(ValueError, match="count"):
        things().fill({"count": torch.zeros(1, dtype=torch.int64)}, 3, 4)


def test_head_shares_memory():
    table = things()
    head = table.head(2)
    assert isinstance(head, Things)
    head.count[1] = 9
    table.flag[0] = True
    assert table.count.tolist() == [-1, 9, -1, -1, -1, -1]
    assert head.flag.tolist() == [True, False]
    assert head.count.data_ptr() == table.count.data_ptr()


def test_reset_rows_and_reset_padding_touch_no_other_row():
    table = scribbled()
    table.reset_rows(torch.tensor([2, 4]))
    assert table.count.tolist() == [100, 101, -1, 103, -1, 105]
    table.reset_padding()
    assert table.count.tolist() == [-1, 101, -1, 103, -1, 105]
    assert_padded(table, slice(0, 1))
    assert (table.share[1] == 7.0).all()


def test_subclasses_add_columns_and_leave_their_parents_as_they_were():
    assert set(SamplingRows.declared) < set(RequestRows.declared)
    assert set(RequestRows.declared) - set(SamplingRows.declared) == {
        "req_to_token",
        "kv_lens",
        "last_tokens",
        "draft_tokens",
    }
    assert not Table.declared


def test_request_rows_have_one_more_than_their_capacity_all_greedy_and_neutral():
    rows = RequestRows(3, 5)
    assert rows.num_rows == 4
    assert rows.req_to_token.shape == (4, 5)
    assert rows.req_to_token.dtype == torch.int32
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0}
    for name in SamplingRows.declared:
        assert (rows[name] == neutral.get(name, 0.0)).all(), name


def test_a_column_without_a_pad_cannot_be_declared():
    """C13: whoever adds an input says what a padded row of it holds."""
    with pytest.raises(TypeError, match="pad"):
        Column(torch.int64)


def test_a_pad_may_be_a_size_of_the_table():
    class Lengths(Table):
        seq_lens = Column(torch.int32, pad="W")

    table = Lengths(4, sizes={"W": 3})
    table.fill({"seq_lens": torch.tensor([9])}, 1, 2)
    assert table.head(2).seq_lens.tolist() == [9, 3]
    assert table.seq_lens.tolist() == [9, 3, 3, 3]

"""What the device is told of rows, once each and in order (C10)."""

import numpy as np

from forebay.memory.draft import Draft
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import as_ids


def make() -> Draft:
    return Draft(1, ReqToTokenPool(4, 32, page_size=4))


def test_what_is_written_stands_in_the_hosts_table_at_once_and_in_the_draft_in_order():
    draft = make()
    draft.write_row(2, 1, as_ids([7, 8]))
    draft.write_each(as_ids([2, 3]), as_ids([3, 0]), as_ids([9, 5]))
    assert draft.rows.req_to_token[2:4, :4].tolist() == [[0, 7, 8, 9], [5, 0, 0, 0]]
    assert [column.tolist() for column in draft.row_writes] == [[2, 2, 2, 3], [1, 2, 3, 0], [7, 8, 9, 5]]


def test_rows_that_nobody_reads_any_more_are_forgotten():
    draft = make()
    draft.write_row(2, 0, as_ids([7]))
    draft.write_row(3, 0, as_ids([8]))
    draft.forget_row(2)
    assert [column.tolist() for column in draft.row_writes] == [[3], [0], [8]]


def test_pages_that_were_remapped_several_times_are_told_once():
    draft = make()
    assert len(draft.remapped) == len(draft.row_writes[0]) == 0
    draft.remap(as_ids([5, 3]))
    draft.remap(np.array([3, 9]))
    assert draft.remapped.tolist() == [3, 5, 9]

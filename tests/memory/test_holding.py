"""What requests hold, by row, and when what they let go of is released (C8, C9)."""

import pytest

from forebay.memory.holding import Allocation, DeferredFree, Outrun, RowTable, StepFence, Steps
from forebay.memory.radix_node import NO_NODE, Pin
from forebay.memory.slots import PAD, as_ids


def allocate(table: RowTable, row: int, *, id: int = 7, extend_target: int = 10) -> Allocation:
    held = Allocation(table, id, Pin(NO_NODE, 0), extend_target)
    held.row = row
    table.move_in(held, max_kv_len=20)
    return held


def test_an_allocation_and_its_row_are_one():
    table = RowTable(5, page_size=4)
    held, other = allocate(table, 3), allocate(table, 1, id=8)
    held.kv_bound = 9
    table.kv_bound[as_ids([1, 3])] += 1
    assert (held.kv_len, other.kv_len) == (10, 1)
    assert table.kv_lens(as_ids([0, 1, 2, 3, 4])).tolist() == [0, 1, 0, 10, 0]
    assert table.request_id.tolist() == [PAD, 8, 0, 7, 0]
    assert (table.allocation_of(3), table.allocation_of(1)) == (held, other)


def test_a_row_begins_anew_with_its_next_tenant():
    table = RowTable(3, page_size=4)
    first = allocate(table, 2)
    first.kv_bound = first.kv_committed = 9
    table.add_drafts(as_ids([2]), as_ids([3]))
    table.move_out(2)
    with pytest.raises(AssertionError, match="nobody runs in row 2"):
        table.allocation_of(2)
    second = allocate(table, 2)
    assert (second.kv_len, second.kv_committed) == (0, 0)


def test_cleared_table_has_no_request_and_zeros_alone():
    table = RowTable(4, page_size=4)
    allocate(table, 1).kv_bound = 9
    allocate(table, 3).kv_committed = 5
    table.add_drafts(as_ids([1]), as_ids([3]))
    table.clear()
    for column in (table.request_id, table.max_kv_len, table.num_pages, table.kv_committed, table.kv_bound):
        assert column.tolist() == [0] * 4
    assert table.kv_lens(as_ids([0, 1, 2, 3])).tolist() == [0] * 4, "nor has it drafts"
    for row in range(4):
        with pytest.raises(AssertionError, match=f"nobody runs in row {row}"):
            table.allocation_of(row)
    table.commit(as_ids([1, 3]), as_ids([7, 8]))
    assert table.kv_committed.tolist() == [0] * 4, "a step that was in flight"


def test_c12_a_length_that_the_device_has_outrun_cannot_be_read():
    table = RowTable(4, page_size=4)
    guessed, other = allocate(table, 1), allocate(table, 2)
    rows = as_ids([1, 2])
    table.kv_bound[rows] = 9, 5
    table.kv_committed[rows] = 8, 4
    table.add_drafts(rows, as_ids([3, 0]))
    assert (other.kv_len, guessed.kv_bound, guessed.kv_committed) == (5, 12, 8)
    for read in (lambda: guessed.kv_len, lambda: table.kv_lens(rows)):
        with pytest.raises(Outrun, match="draft tokens"):
            read()
    table.settle(rows, as_ids([3, 0]), as_ids([2, 1]))
    assert table.kv_lens(rows).tolist() == [10, 5] == table.kv_committed[rows].tolist()


def test_c12_a_length_is_known_when_every_step_that_guesses_has_committed():
    table = RowTable(3, page_size=4)
    held, rows = allocate(table, 1), as_ids([1])
    for count in (2, 4):
        table.kv_bound[rows] += 1
        table.add_drafts(rows, as_ids([count]))
    table.settle(rows, as_ids([2]), as_ids([1]))
    assert (held.kv_committed, held.kv_bound, held.num_drafts) == (1, 6, 4)
    table.settle(rows, as_ids([4]), as_ids([5]))
    assert held.kv_len == held.kv_committed == 6


def test_what_settles_for_a_row_that_was_left_counts_for_nobody():
    table = RowTable(3, page_size=4)
    held, rows = allocate(table, 1), as_ids([1])
    table.add_drafts(rows, as_ids([2]))
    table.move_out(1)
    table.settle(rows, as_ids([2]), as_ids([3]))
    assert held.kv_committed == 0


def test_a_step_counts_for_those_who_still_run_in_its_rows():
    table = RowTable(4, page_size=4)
    staying, ended = allocate(table, 1), allocate(table, 2)
    table.move_out(ended.row)
    table.commit(as_ids([1, 2]), as_ids([5, 6]))
    assert (staying.kv_committed, ended.kv_committed) == (5, 0)
    assert not table.kv_committed[PAD]


def test_a_fence_opens_when_the_steps_launched_before_it_have_committed():
    steps = Steps()
    assert steps.fence().is_open, "nothing is in flight"
    steps.launched = 2
    fence = steps.fence()
    steps.launched, steps.committed = 3, 1
    assert not fence.is_open
    steps.committed = 2
    assert fence.is_open
    assert not StepFence(steps, 3).is_open


def test_pages_that_leave_with_a_pin_count_what_the_pin_keeps():
    fence = Steps().fence()
    assert DeferredFree(fence=fence, request_id=1, pages=as_ids([4, 5])).num_pages == 2
    assert DeferredFree(fence=fence, request_id=1, pages=as_ids([4]), pin=Pin(NO_NODE, 3)).num_pages == 4

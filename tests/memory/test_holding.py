"""What requests hold, by row, and when what they let go of is released (C8, C9)."""

import pytest

from forebay.memory.holding import DeferredFree, Residency, RowTable, StepFence, Steps
from forebay.memory.radix_node import NO_NODE, Pin
from forebay.memory.slots import PAD, as_ids


def resident(table: RowTable, row: int, *, id: int = 7, extend_target: int = 10) -> Residency:
    held = Residency(table, id, Pin(NO_NODE, 0), extend_target)
    held.row = row
    table.move_in(held, max_kv_len=20)
    return held


def test_a_residency_and_its_row_are_one():
    table = RowTable(5, page_size=4)
    held, other = resident(table, 3), resident(table, 1, id=8)
    held.kv_len = 9
    table.kv_len[as_ids([1, 3])] += 1
    assert (held.kv_len, other.kv_len) == (10, 1)
    assert table.kv_len.tolist() == [0, 1, 0, 10, 0]
    assert table.request_id.tolist() == [PAD, 8, 0, 7, 0]
    assert (table.resident(3), table.resident(1)) == (held, other)


def test_a_row_begins_anew_with_its_next_tenant():
    table = RowTable(3, page_size=4)
    first = resident(table, 2)
    first.kv_len = first.kv_committed = 9
    table.move_out(2)
    with pytest.raises(AssertionError, match="nobody runs in row 2"):
        table.resident(2)
    second = resident(table, 2)
    assert (second.kv_len, second.kv_committed) == (0, 0)


def test_pages_are_held_for_all_that_is_known_and_then_for_all_that_is_promised():
    held = resident(RowTable(2, page_size=4), 1, extend_target=10)
    assert held.num_pages == 3
    held.kv_len = 12
    assert held.num_pages == 3
    held.kv_len = 13
    assert held.num_pages == 4


def test_a_step_counts_for_those_who_still_run_in_its_rows():
    table = RowTable(4, page_size=4)
    staying, ended = resident(table, 1), resident(table, 2)
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

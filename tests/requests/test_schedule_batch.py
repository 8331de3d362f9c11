"""Batches are arrays of rows (C9); how requests move and end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.holding import Allocation, RowTable
from forebay.memory.radix_node import NO_NODE, Pin
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.schedule_batch import Chunk, ScheduleBatch

NUM_ROWS = 200


def request(table: RowTable, row: int, num_tokens: int = 5, max_new: int = 4) -> Request:
    """A request, whose id is 100 more than its row's."""
    req = Request(100 + row, range(num_tokens), SamplingParams(max_tokens=max_new))
    req.maybe_allocation = Allocation(table, req.id, Pin(NO_NODE, 0), num_tokens)
    req.allocation.row = row
    table.move_in(req.allocation, max_kv_len=req.max_kv_len)
    return req


def prebuilt(table: RowTable, *rows: int) -> ScheduleBatch:
    batch = ScheduleBatch(table)
    batch.prepare_for_prebuilt([request(table, row, num_tokens=row + 1) for row in rows])
    return batch


def entries(batch: ScheduleBatch) -> list[tuple[int, ...]]:
    """Of each request its id, its row, and what the columns say of that."""
    ids = [req.id for req in batch.reqs]
    columns = (batch.req_pool_indices_cpu, batch.seq_lens_cpu, batch.tokens_left)
    return list(zip(ids, *(column.tolist() for column in columns), strict=True))


def test_c9_extend_computes_from_what_has_kv_to_the_stop():
    table = RowTable(NUM_ROWS, page_size=4)
    req = request(table, 1)
    req.allocation.kv_bound = 2
    batch = ScheduleBatch(table)
    batch.prepare_for_extend([Chunk(req, 2, 4)])
    assert entries(batch) == [(101, 1, 4, 4)]
    assert req.allocation.kv_len == 4


def test_c9_decode_adds_one_token_to_each_or_to_the_active_ones():
    batch = prebuilt(RowTable(NUM_ROWS, page_size=4), 1, 2, 3)
    assert batch.seq_lens_cpu.tolist() == [1, 2, 3]
    batch.prepare_for_decode()
    assert batch.seq_lens_cpu.tolist() == [2, 3, 4]
    batch.prepare_for_decode(np.array([1]))
    assert batch.seq_lens_cpu.tolist() == [2, 4, 4]
    assert [req.allocation.kv_len for req in batch.reqs] == [2, 4, 4]


def test_c9_an_idle_batch_is_empty_in_every_column():
    batch = prebuilt(RowTable(NUM_ROWS, page_size=4), 1, 2)
    batch.prepare_for_idle()
    assert len(batch) == 0
    assert entries(batch) == []


@given(rows=st.lists(st.integers(1, NUM_ROWS - 1), unique=True), at=st.integers(0, NUM_ROWS), data=st.data())
def test_c9_filter_and_merge_keep_every_column_with_its_request(rows, at, data):
    table = RowTable(NUM_ROWS, page_size=4)
    a, b = prebuilt(table, *rows[:at]), prebuilt(table, *rows[at:])
    a.merge_batch(b)
    expected = [(100 + row, row, row, 4) for row in rows]
    assert entries(a) == expected
    keep = data.draw(st.lists(st.sampled_from(range(len(a))), unique=True) if len(a) else st.just([]))
    a.filter_batch(np.array(keep, dtype=np.int64))
    assert entries(a) == [expected[i] for i in keep]


def test_c9_merge_appends_the_rows_of_the_other_batch_in_order():
    table = RowTable(NUM_ROWS, page_size=4)
    batch = prebuilt(table, 3)
    batch.merge_batch(prebuilt(table, 2, 1))
    assert entries(batch) == [(100 + row, row, row, 4) for row in (3, 2, 1)]


def test_c9_filtering_everybody_out_leaves_nothing():
    batch = prebuilt(RowTable(NUM_ROWS, page_size=4), 1, 2)
    batch.filter_batch(np.array([], dtype=np.int64))
    assert entries(batch) == []


def test_what_a_launched_step_took_is_not_changed_by_later_steps():
    table = RowTable(NUM_ROWS, page_size=4)
    batch = prebuilt(table, 1)
    lens, rows = batch.seq_lens_cpu, batch.req_pool_indices_cpu
    batch.merge_batch(prebuilt(table, 2, 3, 4))
    batch.prepare_for_decode()
    assert (lens.tolist(), rows.tolist()) == ([1], [1])


def test_a_request_moves_only_along_the_allowed_ways():
    req = Request(1, [1], SamplingParams())
    with pytest.raises(AssertionError, match="WAITING -> DECODING"):
        req.move(Status.DECODING)
    req.move(Status.FINISHED)
    with pytest.raises(AssertionError, match="FINISHED -> WAITING"):
        req.move(Status.WAITING)
    assert "FINISHED" in repr(req)


def test_request_allocation_without_memory_is_an_error_of_the_caller():
    with pytest.raises(AssertionError, match="has no allocation"):
        _ = Request(1, [1], SamplingParams()).allocation


def test_end_tokens_stop_a_request_unless_it_ignores_them():
    params = SamplingParams(stop_token_ids=(7,))
    assert Request(1, [1], params, eos_token_ids=(2,)).stop_ids == {7, 2}
    ignoring = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    assert Request(1, [1], ignoring, eos_token_ids=(2,)).stop_ids == {7}


def test_the_last_sampled_token_needs_no_kv():
    assert Request(1, range(10), SamplingParams(max_tokens=1)).max_kv_len == 10
    assert Request(1, range(10), SamplingParams(max_tokens=5)).max_kv_len == 14


def test_c9_prebuilt_batch_computes_nothing_of_its_prompts_but_the_last_token() -> None:
    table = RowTable(NUM_ROWS, 16)
    reqs = [request(table, row, num_tokens=row + 1) for row in (3, 1)]
    batch = ScheduleBatch(table)
    batch.prepare_for_prebuilt(reqs)
    assert batch.reqs == reqs
    assert batch.req_pool_indices_cpu.tolist() == [3, 1]
    assert table.kv_lens(batch.req_pool_indices_cpu).tolist() == [3, 1]


def test_request_has_a_namespace_in_files_only_with_the_weights_of_the_start():
    req = Request(1, [1, 2], SamplingParams(), namespace="n")
    req.compute_with(0)
    assert req.durable_namespace == "/n"
    req.compute_with(1)
    assert req.durable_namespace is None

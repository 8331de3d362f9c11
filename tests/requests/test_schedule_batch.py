"""The batch's columns (C9, C12)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.requests.columns import OutrunError
from forebay.requests.request import Request, Status
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.schedule_batch import ForwardMode, ScheduleBatch


def request(id: int, num_tokens: int = 5, max_new: int = 4) -> Request:
    req = Request(id, range(num_tokens), SamplingParams(max_new_tokens=max_new))
    req.req_pool_idx, req.window_start = 100 + id, 200 + id
    return req


def prebuilt(*ids: int) -> ScheduleBatch:
    batch = ScheduleBatch(1)
    batch.prepare_for_prebuilt([request(i, num_tokens=i + 1) for i in ids])
    return batch


def entries(batch: ScheduleBatch) -> list[tuple[int, ...]]:
    columns = [column.__get__(batch, ScheduleBatch).tolist() for column in ScheduleBatch.declared]
    return list(zip(*columns, strict=True))


def test_c9_extend_computes_from_what_has_kv_to_the_stop():
    req = request(1)
    req.kv_len = 2
    batch = ScheduleBatch()
    batch.prepare_for_extend([req], [4])
    assert batch.forward_mode is ForwardMode.EXTEND
    assert batch.prefix_lens_cpu.tolist() == [2]
    assert batch.seq_lens_cpu.tolist() == [4]
    assert batch.req_pool_indices_cpu.tolist() == [101]
    assert batch.max_kv_lens_cpu.tolist() == [8]


def test_c9_decode_adds_one_token_to_each_or_to_the_active_ones():
    batch = prebuilt(1, 2, 3)
    batch.prepare_for_decode()
    assert batch.prefix_lens_cpu.tolist() == [1, 2, 3]
    assert batch.seq_lens_cpu.tolist() == [2, 3, 4]
    batch.prepare_for_decode(np.array([1]))
    assert batch.seq_lens_cpu.tolist() == [2, 4, 4]
    assert batch.forward_mode is ForwardMode.DECODE


def test_c9_an_idle_batch_is_empty_in_every_column():
    batch = prebuilt(1, 2)
    batch.prepare_for_idle()
    assert batch.is_empty
    assert entries(batch) == []
    assert batch.forward_mode is ForwardMode.IDLE


@given(first=st.lists(st.integers(1, 99)), second=st.lists(st.integers(1, 99)), data=st.data())
def test_c9_filter_and_merge_keep_every_column_with_its_request(first, second, data):
    a, b = prebuilt(*first), prebuilt(*second)
    expected = entries(a) + entries(b)
    a.merge_batch(b)
    assert entries(a) == expected
    keep = data.draw(st.lists(st.sampled_from(range(len(a))), unique=True) if len(a) else st.just([]))
    a.filter_batch(np.array(keep, dtype=np.int64))
    assert entries(a) == [expected[i] for i in keep]
    assert [req.id for req in a.reqs] == a.request_ids_cpu.tolist()


def test_c9_filtering_everybody_out_leaves_nothing_stale():
    batch = prebuilt(1, 2)
    batch.filter_batch(np.array([], dtype=np.int64))
    assert entries(batch) == []
    assert batch.forward_mode is ForwardMode.IDLE


def test_what_a_launched_step_took_is_not_changed_by_later_merges():
    batch = prebuilt(1)
    taken = batch.seq_lens_cpu.copy()
    batch.merge_batch(prebuilt(2, 3, 4))
    batch.prepare_for_decode()
    assert taken.tolist() == [1]


def test_c12_a_value_the_device_has_outrun_cannot_be_read():
    batch = prebuilt(1, 2)
    batch.mark_outrun(ScheduleBatch.seq_lens_cpu)
    with pytest.raises(OutrunError, match="seq_lens_cpu"):
        _ = batch.seq_lens_cpu
    assert batch.req_pool_indices_cpu.tolist() == [101, 102]
    merged = prebuilt(3)
    merged.merge_batch(batch)
    with pytest.raises(OutrunError):
        _ = merged.seq_lens_cpu
    batch.settle(ScheduleBatch.seq_lens_cpu, np.array([4, 5]))
    assert batch.seq_lens_cpu.tolist() == [4, 5]


def test_a_request_moves_only_along_the_allowed_ways():
    req = request(1)
    with pytest.raises(AssertionError, match="WAITING -> DECODING"):
        req.move(Status.DECODING)
    req.move(Status.FINISHED)
    with pytest.raises(AssertionError, match="FINISHED -> WAITING"):
        req.move(Status.WAITING)
    assert "FINISHED" in repr(req)


def test_end_tokens_stop_a_request_unless_it_ignores_them():
    params = SamplingParams(stop_token_ids=(7,))
    assert Request(1, [1], params, eos_token_ids=(2,)).stop_ids == {7, 2}
    ignoring = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    assert Request(1, [1], ignoring, eos_token_ids=(2,)).stop_ids == {7}

"""Rows that come with state slots (C3, C4)."""

import contextlib
import logging
from dataclasses import dataclass

import numpy as np
import pytest

from forebay.memory.kinds.state.hybrid_rows import (
    HybridMambaDecodeReqToTokenPool,
    HybridReqToTokenPool,
    effective_mamba_size,
)
from forebay.memory.slots import GROUP, PAD, Holder, OutOfSlots, as_ids


@dataclass
class Req:
    id: int
    row: int = PAD


def make(size: int = 4, mamba_size: int = 20, num_tracking: int = 2) -> HybridReqToTokenPool:
    return HybridReqToTokenPool(size, 16, mamba_size=mamba_size, num_tracking=num_tracking, page_size=4)


@pytest.mark.parametrize(("size", "mamba_size"), [(4, 40), (40, 9)])
@pytest.mark.parametrize("num_tracking", [0, 1, 2])
def test_c3_mappings_are_sized_by_rows_whatever_the_number_of_slots(size, mamba_size, num_tracking):
    pool = make(size, mamba_size, num_tracking)
    assert pool.req_index_to_mamba_index_mapping.shape == (size + 1,)
    assert pool.req_index_to_mamba_ping_pong_track_buffer_mapping.shape == (size + 1, num_tracking)


def test_c3_row_0_maps_to_slot_0_at_all_times():
    pool = make()
    pool.alloc([Req(1), Req(2), Req(3), Req(4)])
    assert pool.req_index_to_mamba_index_mapping[PAD] == PAD
    assert not pool.req_index_to_mamba_ping_pong_track_buffer_mapping[PAD].any()
    assert PAD not in pool.req_index_to_mamba_index_mapping[1:]
    pool.audit([1, 2, 3, 4])


def test_c3_every_row_has_slots_of_its_own():
    pool, reqs = make(), [Req(1), Req(2), Req(3)]
    rows = pool.alloc(reqs)
    slots = [slot for row in rows for slot in pool.slots_of(row)]
    assert len(set(slots)) == 9
    for req, row in zip(reqs, rows, strict=True):
        assert (pool.mamba_pool.owner[pool.slots_of(row)] == req.id).all()


def test_c3_no_row_is_lost_when_a_state_slot_cannot_be_had():
    pool = make(size=4, mamba_size=8, num_tracking=2)
    pool.alloc([Req(1), Req(2)])
    late = Req(3)
    with pytest.raises(OutOfSlots, match="state: wanted 3 slots, 2 are free"):
        pool.alloc([late])
    assert late.row == PAD
    assert pool.available_size() == 2
    assert pool.mamba_pool.available_size() == 2


def test_c3_no_slot_is_lost_when_a_row_cannot_be_had():
    pool = make(size=1)
    pool.alloc([Req(1)])
    with pytest.raises(OutOfSlots, match="rows"):
        pool.alloc([Req(2)])
    assert pool.mamba_pool.available_size() == 17


def test_a_request_that_holds_a_row_keeps_its_slots():
    pool, req = make(), Req(1)
    (row,) = pool.alloc([req])
    slots = pool.slots_of(row)
    assert pool.alloc([req, Req(2)])[0] == row
    assert pool.slots_of(row) == slots


def test_freeing_states_and_then_the_row_gives_everything_back():
    pool, req = make(), Req(1)
    pool.alloc([req])
    pool.mamba_pool.free(as_ids(pool.take_slots(req.row)), req.id)
    pool.free(req)
    pool.audit([])
    pool.mamba_pool.audit([])
    assert pool.available_size() == 4


def test_clear_restores_rows_slots_and_mappings():
    pool = make()
    pool.alloc([Req(1), Req(2)])
    generation = pool.generation.copy()
    pool.clear()
    assert pool.available_size() == 4
    assert pool.mamba_pool.available_size() == 20
    assert not pool.req_index_to_mamba_index_mapping.any()
    assert not pool.req_index_to_mamba_ping_pong_track_buffer_mapping.any()
    assert (pool.generation >= generation).all()


def test_c7_one_group_serves_rows_and_slots():
    pool = make(size=4, mamba_size=20)
    with pool.group(3):
        rows = [pool.alloc([req])[0] for req in (Req(1), Req(2))]
        assert pool.available_size() == 2
    pool.audit(rows)
    holders = [Holder(id, np.array(pool.slots_of(row))) for id, row in zip((1, 2), rows, strict=True)]
    pool.mamba_pool.audit(holders)


def test_c7_rows_and_slots_come_back_from_a_group_that_is_left_by_an_exception():
    pool = make(size=4, mamba_size=20)
    with contextlib.suppress(RuntimeError), pool.group(3):
        raise RuntimeError
    assert not len(pool.slots.held_by(GROUP))
    assert not len(pool.mamba_pool.held_by(GROUP))


@pytest.mark.parametrize(("num_tracking", "needed"), [(0, 12), (1, 24), (2, 36)])
def test_c4_a_decode_server_has_slots_for_running_and_pre_allocated_requests(num_tracking, needed):
    pool = HybridMambaDecodeReqToTokenPool(8, 16, pre_alloc_size=4, mamba_size=5, num_tracking=num_tracking)
    assert pool.mamba_pool.size == needed
    assert len(pool.alloc([Req(i) for i in range(1, 13)])) == 12
    assert pool.mamba_pool.available_size() == 0


def test_c4_running_requests_are_still_limited():
    pool = HybridMambaDecodeReqToTokenPool(2, 16, pre_alloc_size=4, mamba_size=50, num_tracking=1)
    assert pool.mamba_pool.size == 50
    with pytest.raises(OutOfSlots, match="running rows"):
        pool.alloc_running([Req(1)], num_running=2)


def test_c4_one_warning_names_configured_need_and_raised_size(caplog):
    with caplog.at_level(logging.WARNING, logger="forebay"):
        assert effective_mamba_size(5, 12, 2) == 36
        assert effective_mamba_size(36, 12, 2) == 36
    (record,) = caplog.records
    assert record.message.split()[0] == "mamba_cache_size_raised"
    for part in ("configured=5", "12 reqs x 3 slots/req = 36", "raised_to=36"):
        assert part in record.message

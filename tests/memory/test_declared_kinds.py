"""The kinds of cache as they are declared: which have pages, their sizes, what windows reserve, and rings (C24)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forebay.config.engine_config import KindConfig, SchedulerConfig, SpeculationOptions
from forebay.memory.budget import KV
from forebay.memory.holding import Allocation, RowTable
from forebay.memory.kinds.build import KINDS, has_pages, make_kinds, per_request, per_token
from forebay.memory.kinds.declared import CacheSizes, KindSize
from forebay.memory.kinds.kind import Kinds
from forebay.memory.kinds.ring.declaration import STATE_RINGS, RingDemand
from forebay.memory.kinds.ring.rings import RING, Rings
from forebay.memory.kinds.state.cached_states import CachedStates
from forebay.memory.kinds.state.hybrid_rows import STATE
from forebay.memory.kinds.window.cached_windows import WINDOW, CachedWindows
from forebay.memory.req_to_token_pool import ReqToTokenPool
from tests.memory.test_resident_demand import DEMAND

RESIDENT = "resident"
SIZES = CacheSizes(
    1000,
    {
        STATE: KindSize(1, inputs_bytes=5),
        WINDOW: KindSize(20, num_read=64),
        RING: KindSize(300, inputs_bytes=7),
        RESIDENT: KindSize(4000, num_layers=2),
    },
)


def test_kinds_have_pages_and_are_resumed_at_ends_as_declared() -> None:
    kinds = {declared.name: declared.kind for declared in KINDS}
    assert kinds.keys() == {STATE, WINDOW, RING, RESIDENT}
    assert {name for name in (KV, *kinds) if has_pages(name)} == {KV, WINDOW, RESIDENT}
    assert (CachedStates.at_ends, CachedWindows.at_ends) == (True, False)


def test_bytes_of_a_token_are_those_of_pages_without_copies_and_of_a_request_all_others() -> None:
    assert (per_token(SIZES), per_request(SIZES)) == (1000 + 20, 1 + 300)
    assert SIZES.inputs_bytes_per_token == 12
    assert [SIZES.num_bytes(name) for name in (WINDOW, "none")] == [20, 0]
    assert [SIZES.num_read(name) for name in (WINDOW, STATE, "none")] == [64, 0, 0]
    assert KindSize(5) == (5, 0, 0, 0, 0)


def config(page_size: int = 4, **more: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=50,
        page_size=page_size,
        max_running_requests=2,
        context_length=64,
        chunked_prefill_size=16,
        overlap_depth=1,
        kinds=KindConfig(num_slots={WINDOW: 30, RING: 3}, num_read={WINDOW: 6}),
        speculation=SpeculationOptions(num_draft_tokens=3),
    )


def test_windows_reserve_the_pages_of_each_row_and_those_of_chunks_in_flight() -> None:
    windows, rings = make_kinds(config(), ReqToTokenPool(2, 64, page_size=4))
    # A row: 5 tokens before the next one, 5 ahead of it and a margin of 4, in pages of 4; and two begun pages.
    assert (windows.reserve.per_row, windows.reserve.in_flight) == (4 + 2, 3 * 4)  # three chunks of 4 pages
    assert (windows.name, rings.name) == (WINDOW, RING)


def test_c24_ring_is_its_rows_and_the_cache_keeps_none() -> None:
    rings = Rings(3)
    assert (rings.slots.name, rings.slots.capacity) == (RING, 3)
    held = Allocation(RowTable(3, 4), 7, SimpleNamespace(num_pages=0), 5)  # type: ignore[arg-type]
    held.row = 2
    assert rings.transfer_slots(held, rings.holder(held).ids).tolist() == [2]
    assert (rings.holder(held).owner, rings.holder(held).ids.tolist()) == (7, [])
    assert not Kinds([rings]).attached


@pytest.mark.parametrize("rows", [1, 5])
def test_c24_there_are_as_many_rings_as_rows_whatever_is_given(rows: int) -> None:
    demand = STATE_RINGS.demand(KindSize(100), None)  # type: ignore[arg-type]
    assert isinstance(demand, RingDemand)
    assert demand.slot_bytes == 100
    assert demand.num_slots(DEMAND, rows, {}) == (rows, "one for each request row")
    assert demand.least(DEMAND, rows) == rows

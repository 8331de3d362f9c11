"""The kinds of cache as they are declared: which have pages, their sizes, what windows reserve, and rings (C24)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.config.engine_config import (
    DisaggregationMode,
    DisaggregationOptions,
    KindConfig,
    KindOptions,
    Ledger,
    SchedulerConfig,
    SchedulingOptions,
    SpeculationOptions,
    StateStrategy,
)
from forebay.memory.budget import KV
from forebay.memory.draft import Draft
from forebay.memory.holding import Allocation, RowTable
from forebay.memory.kinds.build import (
    CACHES,
    KINDS,
    describe_request,
    has_pages,
    make_demands,
    make_kinds,
    make_rows,
    per_request,
    per_token,
)
from forebay.memory.kinds.declared import CacheSizes, KindSize, Sizing
from forebay.memory.kinds.kind import Arrival, Kinds
from forebay.memory.kinds.resident.residents import Residents
from forebay.memory.kinds.ring.declaration import STATE_RINGS, RingDemand
from forebay.memory.kinds.ring.rings import RING, Rings
from forebay.memory.kinds.state.cached_states import CachedStates
from forebay.memory.kinds.state.hybrid_rows import STATE, HybridReqToTokenPool
from forebay.memory.kinds.window.cached_windows import WINDOW, CachedWindows
from forebay.memory.req_to_token_pool import DecodeReqToTokenPool, ReqToTokenPool
from tests.memory.test_resident_demand import DEMAND
from tests.pictures import picture_config

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


def test_describe_request_says_what_does_not_grow_with_the_length() -> None:
    assert describe_request(CacheSizes(0, {**SIZES.kinds, WINDOW: KindSize(20, num_read=1024)})) == [
        "state 1 B a request, however long, with scans in float32",
        "window 20.0 KiB a request, once it has 1,024 tokens",
        "state rings 300 B a request, however long",
        "a hot buffer, 3.9 KiB for each of its tokens (device_buffer_size)",
    ]


def test_kinds_stand_in_the_order_of_reasons_and_the_reverse_of_tables() -> None:
    assert [declared.name for declared in KINDS] == [STATE, WINDOW, RESIDENT, RING]
    assert CACHES == (KV, RING, RESIDENT, WINDOW, STATE)


def sizing(**changes: Any) -> Sizing:
    given = {
        "sizes": SIZES,
        "page_size": 16,
        "options": KindOptions(swa_full_tokens_ratio=0.5, mamba_full_memory_ratio=0.7, track_interval=48),
        "scheduling": SchedulingOptions(chunked_prefill_size=512, overlap_depth=1),
        "width": 3,
    }
    return Sizing(**{**given, **changes})


def demands(of: Sizing) -> dict[str, Any]:
    return {demand.name: demand for demand in make_demands(of)}


def test_demands_have_the_sizes_of_slots_and_the_settings_that_bear_on_them() -> None:
    found = demands(sizing())
    assert [*found] == [RING, RESIDENT, WINDOW, STATE]
    assert {name: demand.slot_bytes for name, demand in found.items()} == {
        RING: 300, RESIDENT: 16 * 4000, WINDOW: 16 * 20, STATE: 1,
    }  # fmt: skip
    window, state, resident = found[WINDOW], found[STATE], found[RESIDENT]
    assert (window.per_page, window.ratio, window.window, window.track_interval) == (500, 0.5, 64, 48)
    assert (window.overlap_depth, window.width, window.most_prompt_tokens) == (1, 3, 512)
    assert (state.num_tracking, state.cached, state.configured, state.raised, state.ratio) == (2, True, None, 0, 0.7)
    assert (resident.per_page, resident.ratio, resident.chunked_prefill_size) == (500, 2.0, 512)
    assert [demand.per_page for demand in (state, found[RING])] == [None, None]


def test_demand_of_windows_has_bytes_of_pages_and_no_interval_without_states() -> None:
    sizes = CacheSizes(1, {WINDOW: KindSize(20, num_read=64, page_bytes=7)})
    window = demands(sizing(sizes=sizes))[WINDOW]
    assert (window.slot_bytes, window.track_interval) == (16 * 20 + 7, 0)


@pytest.mark.parametrize(("configured", "certain", "raised"), [(None, 9, 0), (10, 0, 0), (10, 9, 27), (40, 9, 40)])
def test_c4_demand_of_states_is_raised_to_what_all_requests_of_a_decode_server_need(
    configured: int | None, certain: int, raised: int
) -> None:
    options = KindOptions(max_mamba_cache_size=configured)
    assert demands(sizing(options=options, num_certain=certain))[STATE].raised == raised


@pytest.mark.parametrize(
    ("strategy", "radix_cache", "num_tracking"),
    [(StateStrategy.EXTRA_BUFFER, True, 2), (StateStrategy.EXTRA_BUFFER, False, 0), (StateStrategy.NO_BUFFER, True, 0)],
)
def test_states_are_tracked_for_the_prefix_cache_with_the_extra_buffer_alone(
    strategy: StateStrategy, radix_cache: bool, num_tracking: int
) -> None:
    scheduling = SchedulingOptions(radix_cache=radix_cache, overlap_depth=1)
    state = demands(sizing(options=KindOptions(strategy=strategy), scheduling=scheduling))[STATE]
    assert (state.num_tracking, state.cached) == (num_tracking, radix_cache)


@pytest.mark.parametrize("states", [0, 30])
@pytest.mark.parametrize("mode", [DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_rows_come_with_the_state_slots_and_on_decode_with_those_of_future_requests(
    states: int, mode: DisaggregationMode
) -> None:
    settings = replace(
        config(),
        kinds=KindConfig(num_slots={STATE: states}),
        disaggregation=DisaggregationOptions(mode=mode, decode_extra_slots=3),
        ledger=Ledger.COUNT,
    )
    rows = make_rows(settings)
    decodes = mode is DisaggregationMode.DECODE
    assert (rows.size, rows.max_context_len, rows.page_size, rows.slots.ledger) == (2, 64, 4, Ledger.COUNT)
    assert rows.slots.capacity == 2 + 3 * decodes
    assert isinstance(rows, DecodeReqToTokenPool) is decodes
    assert isinstance(rows, HybridReqToTokenPool) is bool(states)
    if isinstance(rows, HybridReqToTokenPool):
        assert (rows.mamba_pool.size, rows.num_tracking, rows.mamba_pool.ledger) == (30, 2, Ledger.COUNT)


def test_kinds_without_slots_are_not_made() -> None:
    settings = replace(config(), kinds=KindConfig())
    assert [kind.name for kind in make_kinds(settings, ReqToTokenPool(2, 64, page_size=4))] == []


def test_kinds_have_the_ledger_and_the_slots_of_the_settings() -> None:
    kinds = KindConfig(num_slots={WINDOW: 30, RING: 3, RESIDENT: 9}, num_read={WINDOW: 6})
    made = make_kinds(replace(config(), kinds=kinds, ledger=Ledger.COUNT), ReqToTokenPool(2, 64, page_size=4))
    assert [(kind.name, kind.slots.capacity, kind.slots.ledger) for kind in made] == [
        (WINDOW, 30, Ledger.COUNT),
        (RESIDENT, 9, Ledger.COUNT),
        (RING, 3, Ledger.COUNT),
    ]


@pytest.mark.parametrize(("longest_span", "pages"), [(0, 4), (16, 4), (20, 5)])
def test_windows_reserve_the_pages_of_an_image_that_must_not_be_cut(longest_span: int, pages: int) -> None:
    settings = replace(config(), pictures=picture_config(longest_span=longest_span))
    windows = next(iter(make_kinds(settings, ReqToTokenPool(2, 64, page_size=4))))
    assert windows.reserve.in_flight == 3 * pages


@pytest.mark.parametrize(("hit_pages", "loaded"), [(512, True), (513, False)])
def test_c23_hit_is_loaded_if_the_tokens_behind_it_read_2048_each(hit_pages: int, loaded: bool) -> None:
    rows = ReqToTokenPool(1, 4096, page_size=4)
    copies = Residents(1000, 1000, rows)
    held = Allocation(RowTable(2, 4), 7, SimpleNamespace(num_pages=hit_pages), hit_pages * 4 + 1)  # type: ignore[arg-type]
    rows.alloc([held])
    held.num_pages = hit_pages + 1
    rows.req_to_token[held.row, : hit_pages + 1] = range(1, hit_pages + 2)
    copies.admit(held, Arrival(hit_pages * 4 + 1, False), Draft(1, rows))
    assert (copies.slots.num_free < 1000) is loaded

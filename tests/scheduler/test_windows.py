"""Sliding windows: pages come with the tokens and go as the window moves."""

import numpy as np
import pytest

from forebay.base.errors import EngineError
from forebay.config.engine_config import Ledger
from forebay.memory.kinds.window.demand import window_pages_in_flight, window_pages_per_request
from forebay.requests.request import Status
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import FinishReason
from tests.kinds_of import kind_config, windows_of
from tests.scheduler.rig import Rig

WINDOW = 8


def windowed(depth: int = 0, *, rows: int = 2, chunk: int = 64, page_size: int = 4, **changes) -> Rig:
    """With as few window pages as the rows can need at most."""
    needed = rows * window_pages_per_request(WINDOW, page_size, depth)
    needed += window_pages_in_flight(chunk, page_size, depth)
    state = kind_config(num_window_pages=needed, window=WINDOW)
    changes = {"context_length": 200, "num_pages": 100, **changes}
    return Rig(
        depth=depth,
        overlap_depth=depth,
        max_running_requests=rows,
        chunked_prefill_size=chunk,
        page_size=page_size,
        kinds=state,
        **changes,
    )


def writes(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.kinds.window.map_pages.tolist(), plan.kinds.window.map_windows.tolist(), strict=True))


def test_every_token_has_a_window_page_beside_its_own():
    rig = windowed()
    req = rig.add(10, max_new=6)
    pools = rig.scheduler.pools
    while rig.launch():
        pages = pools.rows.pages(
            req.allocation.row, int(windows_of(pools).start[req.allocation.row]), req.allocation.num_pages
        )
        assert windows_of(pools).map.is_there(pages).all()
        rig.commit()


def test_a_long_decode_holds_no_more_than_its_window():
    rig = windowed(rows=1)
    rig.add(6, max_new=120)
    pool = windows_of(rig.scheduler.pools)
    for _ in range(100):
        rig.step()
        held = pool.slots.capacity - pool.slots.num_free - pool.num_cached
        assert held <= window_pages_per_request(WINDOW, 4, 0)
    rig.run()


@pytest.mark.long
@pytest.mark.quick(1)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("rows", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("chunk", [pytest.param(5, marks=pytest.mark.slow), 16, 64])
def test_the_least_number_of_window_pages_is_enough(depth, chunk, rows, page_size):
    """For prompts that end with their first token, for growing ones, and for those given up with a chunk in flight."""
    rig = windowed(depth, rows=rows, chunk=chunk, page_size=page_size, num_pages=2000, max_queued_requests=64)
    for i in range(40):
        rig.add(64 if i % 2 else 17 * i % 60 + 3, max_new=1 if i % 4 else 2 * i + 1)
    rig.run(3000)
    assert all(rig.finish_of(req) for req in rig.reqs.values())
    given_up = [rig.add(120, max_new=3) for _ in range(20)]
    while not rig.scheduler.idle:
        plan = rig.launch()
        for req in given_up if plan and plan.num_extends else []:
            if req.maybe_allocation and req.allocation.kv_len < 100:
                rig.abort(req.id)
        if rig.flights and (len(rig.flights) > depth or plan is None):
            rig.commit()


def test_rows_hold_no_more_windows_than_they_were_promised_while_twins_of_cached_requests_end():
    """C8: a request that ends with what is cached already holds its own copies, and locks the cached ones."""
    rig = windowed(1, rows=8, chunk=1, page_size=1, num_pages=1000)
    pools = rig.scheduler.pools
    (kind,) = pools.kinds
    for prompt in (*range(4), *range(4), *range(10, 14)):
        rig.add([prompt], max_new=36)
        for _ in range(2 if prompt < 3 else 6):
            rig.step()
    while not rig.scheduler.idle:
        rig.step()
        assert kind.num_available >= pools.num_unpromised(kind)


@pytest.mark.parametrize("num_lost", [1, 5, 40])
def test_c8_quarantined_windows_are_promised_to_no_row(num_lost):
    """Leaked windows are gone for good: fewer requests run, or none and each ends typed, but no step finds too few."""
    rig = windowed(1, rows=3, chunk=4, page_size=1, ledger=Ledger.COUNT)
    pools = rig.scheduler.pools
    windows_of(pools).slots.take_ids(num_lost, 99)
    assert rig.scheduler.reclaim_leaks() == num_lost
    reqs = [rig.add(30, max_new=30) for _ in range(6)]
    most = 0
    for _ in range(600):
        rig.step()
        most = max(most, rig.scheduler.queues.num_running)
    assert most == max(0, pools.num_unpromised(windows_of(pools)) // windows_of(pools).reserve.per_row)
    assert [rig.finish_of(req) for req in reqs] == [FinishReason.LENGTH if most else FinishReason.ERROR] * 6


def test_c18_a_hit_locks_its_window_until_it_has_moved_past_it():
    rig = windowed()
    rig.add(list(range(24)), max_new=1)
    rig.run()
    pool = windows_of(rig.scheduler.pools)
    second = rig.add([*range(24), 60, 61], max_new=14)
    rig.step()
    assert second.cache_report.cached_tokens == 24
    assert pool.num_locked == 2
    for kv_len, locked in ((30, 2), (31, 1), (34, 1), (35, 0)):
        while len(second.tokens) <= kv_len:
            rig.step()
        rig.launch()  # a page stays until it is a page behind the window
        assert pool.num_locked == locked
        rig.commit()
    rig.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_c18_a_window_does_not_move_past_what_a_step_in_flight_reads(depth):
    rig = windowed(depth, chunk=8)
    req = rig.add(60, max_new=20)
    pools = rig.scheduler.pools
    while not rig.scheduler.idle:
        launched = rig.launch()
        if req.maybe_allocation:
            start = req.allocation.kv_committed
            for plan in rig.flights:
                first = windows_of(pools).map.first_needed(start)
                start += plan.num_tokens
                read = pools.rows.pages(req.allocation.row, first, -(-start // 4))
                assert windows_of(pools).map.is_there(read).all()
        if len(rig.flights) > depth or not launched:
            rig.commit()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_prompt", [9, 10, 21, 24])
def test_c18_the_same_prompt_and_the_next_turn_find_their_window_whole(depth, num_prompt):
    rig = windowed(depth, chunk=16)
    first = rig.add(list(range(num_prompt)), max_new=13)
    rig.run()
    again = rig.add(list(range(num_prompt)), max_new=1)
    turn = rig.add([*range(num_prompt), *rig.tokens_of(first), 1, 2], max_new=1)
    rig.run()
    assert again.cache_report.cached_tokens == (num_prompt - 1) // 4 * 4
    assert turn.cache_report.cached_tokens == (num_prompt + 12) // 4 * 4


def test_windows_that_were_evicted_are_computed_again_and_kept():
    rig = windowed(rows=1, chunk=16)
    rig.add(list(range(40)), max_new=1)
    rig.run()
    windows_of(rig.scheduler.pools).in_tree.evict(100)
    again = rig.add([*range(40), 1], max_new=1)
    rig.run()
    report = again.cache_report
    assert (report.cached_tokens, report.kv_tokens, report.resumable["window"]) == (0, 40, 0)
    third = rig.add([*range(40), 2], max_new=1)
    rig.run()
    assert third.cache_report.cached_tokens == 40


def test_the_device_is_told_of_each_new_window_page_once():
    rig = windowed()
    rig.add(10, max_new=4)
    first = rig.step()
    assert sorted(writes(first)) == sorted(first.writes.write_pages.tolist())
    assert writes(rig.step()) == {}


def test_a_hit_that_does_not_fit_yet_unlocks_its_windows():
    rig = windowed(num_pages=16, context_length=64)
    rig.add(list(range(24)), max_new=1)
    rig.run()
    rig.add(list(range(100, 124)), max_new=14)
    rig.step()
    rig.step()
    before = windows_of(rig.scheduler.pools).num_locked
    rig.add([*range(24), 50], max_new=30)
    assert rig.step().num_extends == 0
    assert windows_of(rig.scheduler.pools).num_locked == before
    rig.run()


def test_window_pages_of_a_failed_step_are_written_again():
    rig = windowed()
    staying = rig.add(6, max_new=3)
    rig.step()
    failing = rig.add(6, max_new=3)
    plan = rig.launch()
    rig.flights.clear()
    rig.scheduler.fail(plan, EngineError("broken"))
    assert (staying.status, failing.status) == (Status.WAITING, Status.WAITING)
    cached = np.flatnonzero(windows_of(rig.scheduler.pools).map.full_to_window).tolist()
    again = rig.step()
    assert set(writes(again)) >= {*cached, *rig.scheduler.pools.rows.pages(failing.allocation.row, 0, 2).tolist()}
    assert cached
    rig.run()
    assert (len(rig.tokens_of(staying)), len(rig.tokens_of(failing))) == (3, 3)

"""Recurrent states: what a step begins with, which snapshots it takes, and what becomes of them (C6, C18)."""

import numpy as np
import pytest

from forebay.base.errors import EngineError
from forebay.config.engine_config import Ledger, StateStrategy
from forebay.memory.slots import CACHE
from forebay.requests.step_plan import StepPlan
from forebay.requests.updates import MissReason
from tests.kinds_of import kind_config, states_of, windows_of
from tests.scheduler.rig import Rig


def hybrid(depth: int = 0, *, slots: int = 24, strategy=StateStrategy.EXTRA_BUFFER, track: int = 4, **changes) -> Rig:
    changes.setdefault("page_size", 1 if strategy is StateStrategy.NO_BUFFER else 4)
    state = kind_config(num_slots=slots, strategy=strategy, track_interval=track, anchor_interval=1000)
    return Rig(depth=depth, kinds=state, overlap_depth=depth, **changes)


def snapshots(plan: StepPlan) -> list[tuple[int, int, int]]:
    states = plan.kinds.state
    return list(zip(states.snap_seqs.tolist(), states.snap_lens.tolist(), states.snap_slots.tolist(), strict=True))


def test_c6_a_new_request_begins_with_a_cleared_slot_of_its_own():
    rig = hybrid()
    rig.add(5)
    rig.add(5)
    plan = rig.step()
    assert sorted(plan.kinds.state.clears.tolist()) == sorted(plan.kinds.state.state_slots.tolist())
    assert len(set(plan.kinds.state.state_slots.tolist())) == 2
    assert 0 not in plan.kinds.state.state_slots
    decode = rig.step()
    assert decode.kinds.state.state_slots.tolist() == plan.kinds.state.state_slots.tolist()
    assert len(decode.kinds.state.clears) == len(decode.kinds.state.copy_src) == 0


def test_c18_a_hit_copies_the_cached_state_and_clears_nothing():
    rig = hybrid()
    rig.add(list(range(20)), max_new=1)
    rig.run()
    second = rig.add([*range(20), 50], max_new=1)
    plan = rig.step()
    assert (plan.kinds.state.copy_dst.tolist(), len(plan.kinds.state.clears)) == (
        plan.kinds.state.state_slots.tolist(),
        0,
    )
    assert states_of(rig.scheduler.pools).pool.owner[plan.kinds.state.copy_src] == CACHE
    assert plan.q_lens.tolist() == [1], "the first request ended at a page's end, and its live state was kept"
    assert second.cache_report.resumable == {"state": 20}


def test_c6_a_state_that_a_step_copies_is_locked_until_that_step_has_committed():
    rig = hybrid()
    rig.add(list(range(20)), max_new=1)
    rig.run()
    rig.add([*range(20), 50], max_new=3)
    cached = states_of(rig.scheduler.pools)
    rig.launch()
    assert cached.num_locked == 1
    rig.commit()
    assert cached.num_locked == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_c18_a_snapshot_is_adopted_when_its_step_commits_and_not_before(depth):
    rig = hybrid(depth)
    rig.add(list(range(20)), max_new=2)
    plan = rig.launch()
    (_, length, slot) = snapshots(plan)[-1]
    pool, states = states_of(rig.scheduler.pools).pool, states_of(rig.scheduler.pools)
    assert (length, states.num_cached) == (16, 0)
    assert pool.owner[slot] == 1
    rig.commit()
    assert states.num_cached == 1
    assert pool.owner[slot] == CACHE


def test_c18_of_two_chunks_in_flight_only_the_first_ones_state_is_adopted_when_that_commits():
    rig = hybrid(1, chunked_prefill_size=40, context_length=128)
    rig.add(list(range(80)), max_new=2, resume_points=(32,))
    first, second = rig.launch(), rig.launch()
    assert [snapshots(plan)[-1][1] for plan in (first, second)] == [32, 76]
    pool = states_of(rig.scheduler.pools).pool
    rig.commit()
    assert [pool.owner[snapshots(plan)[-1][2]] for plan in (first, second)] == [CACHE, 1]
    rig.commit()
    assert pool.owner[snapshots(second)[-1][2]] == CACHE


def test_c20_kv_without_a_state_is_computed_again_and_a_state_kept_there():
    rig = hybrid()
    rig.add(list(range(30)), max_new=1)
    rig.run()
    branch = rig.add([*range(14), *range(60, 80)], max_new=1)
    plan = rig.step()
    report = branch.cache_report
    assert (report.cached_tokens, report.kv_tokens, report.resumable["state"]) == (0, 12, 0)
    assert report.miss_reason is MissReason.STATE_MISSING
    assert (report.differs_at, report.token_here, report.token_there) == (14, 60, 14)
    assert [length for _, length, _ in snapshots(plan)] == [12, 32]
    rig.run()
    again = rig.add([*range(14), *range(80, 99)], max_new=1)
    rig.run()
    assert again.cache_report.cached_tokens == 12


def test_a_prompt_waits_for_one_under_way_that_will_leave_a_state_where_they_part():
    rig = hybrid(chunked_prefill_size=16, context_length=128, num_pages=100)
    rig.add([*range(40), 90, 91, 92, 93, 94], max_new=1)
    second = rig.add([*range(40), 95, 96, 97, 98, 99], max_new=1)
    plan = rig.step()
    assert plan.num_extends == 1
    rig.run()
    assert second.cache_report.cached_tokens == 40


def test_a_decoding_request_tracks_its_state_and_the_next_turn_goes_on_from_it():
    rig = hybrid(sample=lambda row: 500, track=8)
    first = rig.add(list(range(10)), max_new=19)
    rig.run()
    tracked = [n for plan in rig.plans for _, n, _ in snapshots(plan)]
    assert tracked == [8, 16, 24]
    turn = rig.add([*range(10), *rig.tokens_of(first), 60, 61], max_new=1)
    rig.run()
    assert turn.cache_report.cached_tokens == 28, "it ended at a page's end: the live state itself was kept"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_stopped_while_a_step_is_in_flight_gives_a_tracked_state_not_the_live_one(depth):
    rig = hybrid(depth, sample=lambda row: 500, track=4)
    first = rig.add(list(range(7)), max_new=30)
    while first.num_output < 10:
        rig.step()
    pools = rig.scheduler.pools
    live = states_of(pools).tracking(first.allocation).live
    rig.abort(first.id)
    rig.run()
    assert (states_of(pools).pool.owner[live] == CACHE) == (depth == 0)
    assert states_of(pools).num_cached == states_of(pools).pool.capacity - states_of(pools).pool.num_free
    again = rig.add([*range(7), *[500] * 10], max_new=1)
    rig.run()
    assert again.cache_report.cached_tokens == 16


def test_c3_tracking_slots_are_two_with_overlap_and_one_without():
    for depth, width in ((0, 1), (1, 2)):
        mapping = hybrid(depth).scheduler.pools.rows.req_index_to_mamba_ping_pong_track_buffer_mapping
        assert mapping.shape[1] == width


def test_no_buffer_ends_chunks_at_anchors_and_copies_the_state_before_the_next():
    rig = hybrid(strategy=StateStrategy.NO_BUFFER, context_length=128, num_pages=128)
    rig.add(list(range(60)), max_new=3, resume_points=[10])
    first, second, third = rig.step(), rig.step(), rig.step()
    assert [int(plan.q_lens[0]) for plan in (first, second, third)] == [10, 49, 1]
    assert len(first.kinds.state.copy_src) == 0
    assert (
        second.kinds.state.copy_src.tolist()
        == third.kinds.state.copy_src.tolist()
        == first.kinds.state.state_slots.tolist()
    )
    assert all(len(plan.kinds.state.snap_slots) == 0 for plan in rig.plans)
    rig.run()
    for prompt, cached in ((range(60), 59), ([*range(10), 99], 10), ([*range(60), 1000, 1000, 1], 62)):
        req = rig.add(list(prompt), max_new=1)
        rig.run()
        assert req.cache_report.cached_tokens == cached


def test_a_hit_is_given_up_when_its_state_is_the_only_slot_that_could_be_had():
    rig = hybrid(slots=2, max_running_requests=1)
    rig.add(list(range(20)), max_new=1)
    rig.run()
    req = rig.add([*range(20), 50], max_new=2)
    rig.run()
    assert len(rig.tokens_of(req)) == 2
    assert req.cache_report.cached_tokens == 0
    assert req.cache_report.miss_reason is MissReason.STATE_MISSING


def test_snapshots_that_cannot_have_a_slot_are_skipped_and_counted():
    rig = hybrid(slots=2, max_running_requests=1)
    rig.add(list(range(20)), max_new=2)
    plan = rig.step()
    assert len(plan.kinds.state.snap_slots) == 0
    assert rig.scheduler.state(0.0).counters["states_skipped"] == 1
    rig.run()


def test_c8_an_aborted_prompt_gives_back_every_slot():
    rig = hybrid(1, chunked_prefill_size=8)
    req = rig.add(list(range(40)), max_new=1)
    rig.launch()
    rig.launch()
    rig.abort(req.id)
    rig.scheduler.audit()
    rig.run()
    pools = rig.scheduler.pools
    assert states_of(pools).pool.num_free + states_of(pools).num_cached == 24


def test_a_failed_step_leaves_nothing_behind():
    rig = hybrid()
    rig.add(list(range(40)), max_new=1)
    plan = rig.launch()
    rig.flights.clear()
    rig.scheduler.fail(plan, EngineError("broken"))
    rig.scheduler.audit()
    assert states_of(rig.scheduler.pools).pool.num_free == 24
    assert rig.scheduler.pools.cache.num_pages == 0


def test_c7_a_prefill_pass_opens_exactly_one_group(monkeypatch):
    rig = hybrid(max_running_requests=6, slots=40)
    opened = []
    pool = states_of(rig.scheduler.pools).pool
    begin = pool.alloc_group_begin
    monkeypatch.setattr(pool, "alloc_group_begin", lambda n: (opened.append(n), begin(n)))
    for _ in range(5):
        rig.add(4, max_new=1)
    rig.launch()
    assert opened == [10], "five requests with a live and a tracking slot each"
    assert np.count_nonzero(pool.owner > 0) == 10


def test_a_hit_that_does_not_fit_yet_is_let_go_of_whole():
    rig = hybrid(num_pages=16, schedule_conservativeness=1.0)
    rig.add(list(range(20)), max_new=1)
    rig.run()
    rig.add(list(range(100, 124)), max_new=16)
    rig.step()
    rig.add([*range(20), 50], max_new=30)
    plan = rig.step()
    assert plan.num_extends == 0
    assert states_of(rig.scheduler.pools).num_locked == 0
    rig.run()


def test_without_the_prefix_cache_nothing_is_tracked_or_kept():
    rig = hybrid(radix_cache=False, slots=8)
    rig.add(list(range(20)), max_new=20)
    rig.run()
    assert not any(len(plan.kinds.state.snap_slots) for plan in rig.plans)
    assert rig.scheduler.pools.rows.slots_per_req == 1
    assert states_of(rig.scheduler.pools).pool.num_free == 8


def test_equal_prompts_under_way_leave_one_state_in_the_cache():
    rig = hybrid(1)
    rig.add(list(range(20)), max_new=1)
    rig.add(list(range(20)), max_new=1)
    rig.run()
    assert states_of(rig.scheduler.pools).num_cached == 2, "after 16 tokens, and after the last"
    assert states_of(rig.scheduler.pools).pool.num_free == 22


def test_c8_leaked_slots_and_windows_are_quarantined_when_idle():
    state = kind_config(num_slots=8, num_window_pages=20, window=8)
    rig = Rig(kinds=state, ledger=Ledger.COUNT)
    pools = rig.scheduler.pools
    states_of(pools).pool.take_ids(2, 77)
    windows_of(pools).slots.take_ids(1, 77)
    assert rig.scheduler.reclaim_leaks() == 3
    assert states_of(pools).pool.num_quarantined == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_update_names_the_places_from_which_others_can_go_on(depth):
    """C18, C20: of what it found and of what it left."""
    rig = hybrid(depth)
    rig.add(list(range(20)), max_new=1)
    rig.run()
    rig.add([*range(20), *range(40, 53)], max_new=9)
    rig.run()
    told = {update.request_id: update.memory for update in rig.updates if update.finish}
    assert told[1].checkpoints == [16, 20]
    tokens = [*range(20), *range(40, 53), *[1000] * 9]
    for length in told[2].checkpoints:
        probe = rig.scheduler.pools.cache.index.match(np.array(tokens[:length], dtype=np.int32).tobytes(), "0/")
        assert probe.num_tokens == length
    assert len(told[2].checkpoints) > 2
    assert told[2].checkpoints[-1] > 33, "one is behind the prompt"

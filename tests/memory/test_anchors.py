"""Where states are worth keeping."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.anchors import MAX_PER_PROMPT, MIN_DISTANCE, Anchor, Reason, plan_anchors
from forebay.memory.kinds.state.recurrent import Snapshot, Tracking


def plan(
    start=0, num_prompt=1000, page_size=1, resume_points=(), branches=(), interval=10_000
) -> list[tuple[int, Reason]]:
    found = plan_anchors(
        start=start,
        num_prompt=num_prompt,
        page_size=page_size,
        resume_points=resume_points,
        branches=branches,
        interval=interval,
    )
    return [tuple(point) for point in found]


def test_the_end_of_a_prompt_is_kept_short_of_its_last_token():
    assert plan() == [(999, Reason.END)]
    assert plan(page_size=16) == [(992, Reason.END)]
    assert plan(page_size=16, num_prompt=993) == [(992, Reason.END)]


def test_a_prompt_shorter_than_a_page_keeps_nothing():
    assert plan(num_prompt=16, page_size=16) == []


def test_places_are_cut_to_whole_pages_and_must_lie_ahead():
    assert plan(start=160, resume_points=[100, 170, 500, 1200], page_size=16) == [
        (496, Reason.RESUME),
        (992, Reason.END),
    ]


def test_a_branching_point_beside_the_end_is_worth_a_slot_of_its_own():
    assert plan(branches=[998, 300]) == [(300, Reason.BRANCH), (998, Reason.BRANCH), (999, Reason.END)]


def test_hints_too_close_to_something_better_are_left_out():
    assert plan(resume_points=[990, 960, 310], branches=[300]) == [
        (300, Reason.BRANCH),
        (960, Reason.RESUME),
        (999, Reason.END),
    ]


def test_an_interval_is_the_floor():
    assert [length for length, _ in plan(interval=300)] == [300, 600, 900, 999]
    assert [length for length, _ in plan(start=250, interval=300)] == [550, 850, 999]


def test_over_budget_the_better_reasons_stay_and_then_the_later_places():
    points = plan(num_prompt=10_001, branches=[5000], resume_points=range(100, 1200, 100), interval=1000)
    assert len(points) == MAX_PER_PROMPT
    assert points == [*[(n, Reason.RESUME) for n in range(600, 1200, 100)], (5000, Reason.BRANCH), (10_000, Reason.END)]


@given(
    start=st.integers(0, 400),
    num_prompt=st.integers(1, 800),
    page_size=st.sampled_from([1, 4, 16]),
    resume_points=st.lists(st.integers(0, 1000), max_size=12),
    branches=st.lists(st.integers(0, 1000), max_size=6),
    interval=st.integers(1, 500),
)
def test_every_plan_is_ascending_in_whole_pages_ahead_of_the_start_and_short_of_the_end(
    start, num_prompt, page_size, resume_points, branches, interval
):
    start -= start % page_size
    points = plan(start, num_prompt, page_size, resume_points, branches, interval)
    lengths = [length for length, _ in points]
    assert lengths == sorted(set(lengths))
    assert all(start < length < num_prompt and length % page_size == 0 for length in lengths)
    assert len(points) <= MAX_PER_PROMPT
    apart = [b - a for (a, _), (b, reason) in itertools.pairwise(points) if reason is Reason.INTERVAL]
    assert all(distance >= MIN_DISTANCE for distance in apart)


@pytest.mark.parametrize("buffers", [[5], [5, 6]])
def test_a_tracking_slot_with_the_only_complete_state_is_not_written_if_there_is_another(buffers):
    tracking = Tracking(1, buffers, [])
    for step in range(1, 9):
        slot = tracking.next_buffer()
        assert slot in buffers
        if tracking.tracked and len(buffers) == 2:
            assert slot != tracking.tracked.slot
        assert tracking.reserve_snapshot(step, step * 8) == slot
        assert tracking.next_buffer() is None, "one is being written"
        assert (tracking.latest is not None) == (step > 1 and len(buffers) == 2)
        tracking.complete(step - 1, step * 8 - 1)
        assert tracking.latest != Snapshot(step, step * 8, slot), "its step is still in flight"
        tracking.complete(step, step * 8)
        assert tracking.latest == Snapshot(step, step * 8, slot)


def test_a_wish_that_no_step_came_to_leaves_what_was_tracked():
    tracking = Tracking(1, [5], [])
    assert tracking.reserve_snapshot(1, 8) == 5
    tracking.complete(1, 8)
    assert tracking.reserve_snapshot(2, 16) == 5
    assert tracking.latest is None, "the step may come there"
    tracking.complete(2, 15)
    assert tracking.latest == Snapshot(1, 8, 5)


def test_steps_in_flight_that_may_come_to_the_same_length_share_a_wish():
    tracking = Tracking(1, [5, 6], [])
    assert tracking.reserve_snapshot(1, 16) == tracking.reserve_snapshot(2, 16) == 5
    assert tracking.reserve_snapshot(3, 24) is None
    tracking.complete(1, 16)
    assert tracking.latest is None, "the second step may be writing it"
    tracking.complete(2, 18)
    assert tracking.latest == Snapshot(2, 16, 5)
    assert tracking.reserve_snapshot(3, 24) == 6


def test_a_length_that_a_step_in_flight_may_pass_without_the_wish_is_not_wished_for():
    """It would be taken for there although no step that has the wish came to it."""
    tracking = Tracking(1, [5, 6], [])
    assert tracking.reserve_snapshot(1, 8) == 5
    assert tracking.reserve_snapshot(2, 16) is None, "the first is still being written"
    tracking.complete(1, 8)
    assert tracking.reserve_snapshot(3, 16, too_late=True) is None
    assert tracking.reserve_snapshot(3, 24) == 6
    assert tracking.reserve_snapshot(4, 24, too_late=True) == 6, "the step before has it as well"


def test_c18_a_snapshot_is_ready_only_when_its_step_has_committed():
    tracking = Tracking(1, [], [Anchor(4, Reason.RESUME), Anchor(9, Reason.END)])
    assert tracking.to_come == [4, 9]
    assert tracking.pop_ahead(8) == [Anchor(4, Reason.RESUME)]
    tracking.pending.append(Snapshot(3, 4, 7))
    tracking.complete(2, 4)
    assert not tracking.ready
    assert tracking.own_slots == [7]
    assert tracking.to_come == [4, 9]
    tracking.complete(3, 4)
    assert tracking.ready == [Snapshot(3, 4, 7)]

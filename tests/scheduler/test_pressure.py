"""What happens when memory runs short (C26), and what steps in flight may still write."""

import pytest

from forebay.config.engine_config import SchedulePolicy
from forebay.requests.request import Status
from forebay.requests.updates import FinishReason
from tests.scheduler.rig import Rig

# -- memory pressure --------------------------------------------------------------------------------------------------


def pressed(depth: int = 0, **changes) -> Rig:
    """Two requests of which only one can finish at a time."""
    rig = Rig(page_size=1, num_pages=16, schedule_conservativeness=0.01, depth=depth, **changes)
    rig.add(4, max_new=9)
    rig.add(4, max_new=9)
    return rig


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_c26_the_youngest_gives_way_and_both_finish_with_all_their_tokens(depth):
    rig = pressed(depth)
    rig.run()
    assert [len(rig.tokens_of(req)) for req in rig.reqs.values()] == [9, 9]
    assert [req.num_retractions for req in rig.reqs.values()] == [0, 1]
    ends = [u.request_id for u in rig.updates if u.finish]
    assert ends == [1, 2]


def test_with_priorities_the_lowest_gives_way():
    rig = Rig(page_size=1, num_pages=16, schedule_conservativeness=0.01, schedule_policy=SchedulePolicy.PRIORITY)
    rig.add(4, max_new=9, priority=1)
    rig.add(4, max_new=9, priority=2)
    rig.run()
    assert [req.num_retractions for req in rig.reqs.values()] == [1, 0]


def test_a_retraction_raises_the_new_token_ratio_and_idleness_resets_it():
    rig = pressed()
    first = rig.scheduler.ratio.value
    while not rig.scheduler.counters.get("retractions"):
        rig.step()
    assert rig.scheduler.ratio.value > first
    rig.run()
    assert rig.scheduler.ratio.value == first


def test_a_request_retracted_too_often_starts_only_when_it_has_the_engine_to_itself():
    rig = Rig()
    rig.add(4, max_new=20)
    rig.step()
    often = rig.add(4)
    often.num_retractions = 8
    rig.step()
    assert often.status is Status.WAITING
    rig.run()
    assert rig.finish_of(often) is FinishReason.LENGTH


def test_a_retracted_request_may_still_finish_by_the_step_that_was_in_flight():
    tokens = iter([1, 1, *[1] * 6, 7, 7, *[1] * 50])
    rig = pressed(depth=1)
    rig._sample = lambda row: next(tokens)
    rig.run()
    assert rig.scheduler.idle
    assert rig.free_pages + rig.scheduler.pools.cache.num_pages == 16


# -- steps in flight --------------------------------------------------------------------------------------------------


def test_finished_request_keeps_its_pages_until_the_launched_step_commits():
    rig = Rig(depth=1, sample=lambda row: 7, radix_cache=False)
    rig.add(3)
    rig.launch()
    rig.launch()  # nothing is known of the first step yet, so it decodes once more
    rig.commit()
    assert rig.scheduler.idle is False
    assert rig.free_pages == 63
    assert rig.commit() == []
    assert rig.free_pages == 64
    assert rig.scheduler.idle


def test_a_request_that_a_step_in_flight_ends_for_certain_is_not_launched_again():
    rig = Rig(depth=1)
    rig.add(3, max_new=2)
    assert [rig.launch() is not None for _ in range(3)] == [True, True, False]


def test_steps_commit_in_the_order_of_their_plans():
    rig = Rig(depth=1)
    rig.add(3)
    rig.launch()
    rig.launch()
    rig.flights.reverse()
    with pytest.raises(AssertionError, match="was committed before step 1"):
        rig.commit()

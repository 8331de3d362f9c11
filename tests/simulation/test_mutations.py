"""The simulator's own test: with a bug put into the product, a seed must fail soon.

All bugs from seed 0, with the score: `python -m tests.simulation.mutations`.
"""

import pytest

from tests.simulation.mutations import MUTATIONS, found_after
from tests.simulation.simulator import run_seed

PER_COMMIT = 1500  # as many as `test_seeds.py` runs

# Looked at first, that a run need not look for them: where they are found late. A line that is missing or no longer
# true costs the search from seed 0 on and nothing else.
FOUND_AT = {
    "a_copied_state_is_let_go_before_its_step_ran": 36,
    "a_copy_that_a_failed_step_was_to_make_is_relied_on": 27,
    "a_hit_begins_with_the_state_of_a_shorter_prefix": 19,
    "a_live_state_is_donated_although_a_step_in_flight_takes_it_further": 19,
    "a_retracted_request_survives_the_failure_of_its_step": 37,
    "a_row_turns_to_cached_pages_that_have_lost_their_windows": 29,
    "a_tracked_state_is_adopted_with_all_that_is_committed": 38,
    "a_window_with_a_hole_is_a_hit": 29,
    "an_abort_goes_by_the_ids_beginning": 79,
    "an_evicted_state_is_still_found": 19,
    "chunks_run_past_the_checkpoints_of_live_states": 64,
    "one_table_entry_is_written_twice_in_a_step": 19,
    "splitting_an_edge_leaves_the_state_with_the_upper_part": 19,
    "the_prompt_is_compared_with_what_its_admission_left_of_the_cache": 132,
    "timeouts_are_not_noticed": 31,
    "tracking_slots_do_not_take_turns": 175,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name):
    seed = found_after(name, [FOUND_AT.get(name, 0), *range(PER_COMMIT)])
    assert seed is not None, f"no seed below {PER_COMMIT} fails although {name.replace('_', ' ')}"
    run_seed(seed)  # and the product itself passes that seed

"""The simulator's own test: with a bug put into the product, a seed must fail soon.

All bugs from seed 0, with the score: `python -m tests.simulation.mutations`.
"""

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.simulator import run_seed

PER_COMMIT = 700  # as many as `test_seeds.py` runs

# Looked at first, that a run need not look for them: where they are found late. A line that is missing or no longer
# true costs the search from seed 0 on and nothing else.
FOUND_AT = {
    "a_copied_state_is_let_go_before_its_step_ran": 24,
    "a_copy_is_loaded_into_the_slot_of_the_last_tenant": 11,
    "a_hit_begins_with_the_state_of_a_shorter_prefix": 19,
    "a_length_is_wished_for_that_a_step_in_flight_may_pass": 621,
    "a_live_state_is_donated_although_a_step_in_flight_takes_it_further": 19,
    "a_pinned_leaf_is_evicted": 19,
    "a_request_that_fails_behind_a_token_does_not_hear_it": 86,
    "a_retracted_request_goes_on_with_whatever_its_slot_holds": 11,
    "a_retracted_request_has_all_the_time": 36,
    "a_snapshot_is_that_of_the_bound": 11,
    "a_state_is_tracked_a_token_late": 11,
    "a_stop_token_within_the_accepted_is_ignored": 14,
    "a_tracked_state_is_adopted_with_all_that_is_committed": 25,
    "a_victims_length_is_taken_from_the_bound": 435,
    "a_window_moves_on_by_the_bound": 10,
    "a_window_moves_on_with_a_step_in_flight": 10,
    "an_abort_goes_by_the_ids_beginning": 165,
    "an_abort_is_lost_while_a_prompt_is_under_way": 13,
    "chunks_run_past_the_anchors_of_live_states": 37,
    "lpm_passes_over_whoever_has_no_hit": 14,
    "only_those_who_decode_give_way": 40,
    "only_what_samples_is_looked_at": 24,
    "prompt_logprobs_are_sent_twice_after_a_retraction": 46,
    "splitting_an_edge_leaves_the_state_with_the_upper_part": 19,
    "the_prompt_is_compared_with_what_its_admission_left_of_the_cache": 26,
    "the_queue_counts_as_time_without_a_token": 6,
    "tracking_slots_do_not_take_turns": 25,
    "what_a_failed_request_computed_is_adopted": 95,
    "what_has_not_come_back_from_the_host_is_adopted": 6,
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str) -> None:
    seed = MUTATIONS.found_after(name, [FOUND_AT.get(name, 0), *range(PER_COMMIT)])
    assert seed is not None, f"no seed below {PER_COMMIT} fails although {name.replace('_', ' ')}"
    run_seed(seed)  # and the product itself passes that seed

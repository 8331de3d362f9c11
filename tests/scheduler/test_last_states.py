"""The state of a request that ends while a step still computes for it (C18)."""

import pytest

from forebay.base.errors import EngineError
from forebay.config.engine_config import StateStrategy
from forebay.memory.slots import CACHE
from tests.kinds_of import kind_config, states_of
from tests.scheduler.rig import Rig

STOP = 7


def rig_of(depth: int, strategy=StateStrategy.NO_BUFFER, **changes) -> Rig:
    state = kind_config(num_slots=24, strategy=strategy, track_interval=64, anchor_interval=1000)
    tokens = iter([*range(1000, 1005), STOP])
    rig = Rig(lambda row: next(tokens, 2000), depth, kinds=state, overlap_depth=depth, page_size=1, **changes)
    rig.add(list(range(10)), max_new=30)
    return rig


def stopped(depth: int, **changes) -> tuple[Rig, int]:
    """A request that has just sampled its stop token; its live slot."""
    rig = rig_of(depth, **changes)
    live = 0
    while not (rig.updates and rig.updates[-1].finish):
        rig.step()
        req = rig.reqs[1]
        live = states_of(rig.scheduler.pools).tracking(req.allocation).live if req.maybe_allocation else live
    return rig, live


def cached_of_next_turn(rig: Rig) -> int:
    turn = rig.add([*range(10), *range(1000, 1005), STOP, 60, 61], max_new=1)
    rig.run()
    return turn.cache_report.cached_tokens


@pytest.mark.parametrize("strategy", StateStrategy)
@pytest.mark.parametrize("depth", [0, 1])
def test_c18_the_step_in_flight_reads_the_stop_token_and_its_state_is_kept(depth, strategy):
    rig, live = stopped(depth, strategy=strategy)
    pool = states_of(rig.scheduler.pools).pool
    assert (pool.owner[live] == CACHE) == (depth == 0), "nobody gets a state that a step is still writing"
    rig.run()
    assert pool.owner[live] == CACHE
    assert cached_of_next_turn(rig) == 15 + depth


def test_two_steps_in_flight_go_beyond_what_is_known_and_the_live_state_is_lost():
    rig, _ = stopped(2)
    rig.run()
    assert cached_of_next_turn(rig) == 9


def test_a_state_whose_step_failed_is_never_kept():
    rig, live = stopped(1)
    rig.fail(EngineError("boom"))
    rig.scheduler.audit()
    assert states_of(rig.scheduler.pools).pool.owner[live] != CACHE
    rig.run()
    assert cached_of_next_turn(rig) == 9


def test_a_state_that_gave_no_finite_logits_is_never_kept():
    rig, live = stopped(1)
    rig.commit(failed=(0,))
    assert states_of(rig.scheduler.pools).pool.owner[live] != CACHE
    assert cached_of_next_turn(rig) == 9


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_of_an_aborted_prompt_the_chunks_in_flight_are_kept(depth):
    rig = Rig(depth=depth, kinds=kind_config(num_slots=24), overlap_depth=depth, page_size=4, chunked_prefill_size=8)
    req = rig.add(40, max_new=1)
    rig.step()
    rig.step()
    rig.abort(req.id)
    rig.scheduler.audit()
    rig.run()
    again = rig.add(list(req.tokens), max_new=1)
    rig.run()
    assert again.cache_report.cached_tokens == 16

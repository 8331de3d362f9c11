"""State slots and their allocation groups (C6, C7)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.memory.draft import Draft
from forebay.memory.kinds.state.hybrid_rows import MambaPool
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import GROUP, PAD, LedgerError, OutOfSlots

ALICE, BOB = 1, 2


def test_c6_slot_0_is_never_handed_out():
    pool = MambaPool(5)
    assert sorted(pool.alloc(5, ALICE)) == [1, 2, 3, 4, 5]
    assert pool.available_size() == 0
    with pytest.raises(OutOfSlots, match="state: wanted 1 slots, 0 are free"):
        pool.alloc(1, ALICE)


def test_c6_clears_and_copies_are_written_into_the_draft_of_a_step():
    pool, draft = MambaPool(4), Draft(1, ReqToTokenPool(1, 4))
    pool.clear_state(2, draft)
    pool.copy_from(1, 3, draft)
    assert (draft.clears, draft.copies) == ([2], [(1, 3)])


def test_c7_slots_drawn_from_a_group_are_booked_for_those_who_drew_them():
    pool = MambaPool(8)
    with pool.group(4):
        mine, theirs = pool.take_one(ALICE), pool.take_one(BOB)
        assert pool.available_size() == 6
    assert pool.owner[[mine, theirs]].tolist() == [ALICE, BOB]
    assert pool.available_size() == 6


def test_c7_a_slot_may_be_freed_or_given_away_while_the_group_it_came_from_is_open():
    pool = MambaPool(8)
    with pool.group(4):
        mine, theirs = pool.take_one(ALICE), pool.take_one(BOB)
        pool.transfer(np.array([theirs]), BOB, ALICE)  # neither is booked yet
        pool.free(np.array([mine]), ALICE)
    assert pool.available_size() == 7
    assert pool.held_by(ALICE).tolist() == [theirs]


def test_c8_a_slot_drawn_from_a_group_cannot_be_freed_by_another():
    pool = MambaPool(8)
    with pool.group(4), pytest.raises(LedgerError, match="request 2"):
        pool.free(np.array([pool.take_one(ALICE)]), BOB)


def test_c7_an_exception_returns_what_the_group_has_left():
    pool = MambaPool(8)
    pool.take_one(ALICE)
    with pytest.raises(OutOfSlots), pool.group(5):
        pool.alloc(8, ALICE)
    assert pool.available_size() == 7
    assert not (pool.owner == GROUP).any()


@given(size=st.integers(1, 12), asked=st.integers(0, 14), draws=st.integers(0, 14), again=st.booleans())
def test_c7_nothing_is_lost_whatever_a_group_asks_and_draws(size, asked, draws, again):
    pool, drawn = MambaPool(size), []
    pool.alloc_group_begin(asked)
    if again:
        pool.alloc_group_begin(asked)
    for _ in range(min(draws, size)):
        drawn.append(pool.take_one(ALICE))
        assert pool.available_size() == size - len(drawn)
    pool.alloc_group_end()
    pool.alloc_group_end()
    assert len(set(drawn)) == len(drawn)
    assert PAD not in drawn
    pool.free(np.array(drawn, dtype=np.int64), ALICE)
    pool.audit([])
    assert pool.available_size() == size

"""Slots, leases, groups and the ledger (C7, C8)."""

import contextlib

import numpy as np
import pytest

from forebay.config.engine_config import Ledger
from forebay.memory.slots import CACHE, GROUP, PAD, QUARANTINE, Holder, LedgerError, OutOfSlots, Slots

ALICE, BOB = 1, 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_every_slot_but_the_padding_one_is_handed_out_once():
    slots = Slots("pages", 5)
    assert sorted(slots.take_ids(5, ALICE).tolist()) == [1, 2, 3, 4, 5]
    assert slots.num_free == 0


def test_taking_none_takes_none():
    slots = Slots("pages", 3)
    assert len(slots.take_ids(0, ALICE)) == 0
    assert slots.num_free == 3


def test_taking_too_many_takes_none_and_says_the_numbers():
    slots = Slots("pages", 3)
    with pytest.raises(OutOfSlots, match="pages: wanted 4 slots, 3 are free"):
        slots.take_ids(4, ALICE)
    assert slots.num_free == 3


def test_generation_grows_each_time_a_slot_is_handed_out_and_survives_clear():
    slots = Slots("rows", 1)
    seen = []
    for _ in range(3):
        slots.return_ids(slots.take_ids(1, ALICE), ALICE)
        seen.append(int(slots.generation[1]))
    slots.clear()
    slots.take_ids(1, ALICE)
    seen.append(int(slots.generation[1]))
    assert seen == sorted(set(seen))


def test_slots_may_be_taken_for_several_owners_at_once():
    slots = Slots("pages", 4)
    taken = slots.take_ids(2, ids(ALICE, BOB))
    assert slots.held_by(ALICE).tolist() == taken[:1].tolist()
    assert slots.held_by(BOB).tolist() == taken[1:].tolist()


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        (lambda mine, theirs: mine[[0, 0]], "twice in one call"),
        (lambda mine, theirs: ids(PAD), "outside 1..4"),
        (lambda mine, theirs: ids(-1), "outside 1..4"),
        (lambda mine, theirs: ids(5), "outside 1..4"),
        (lambda mine, theirs: theirs, "foreign slot .* request 2"),
    ],
)
def test_a_wrong_free_is_caught_and_attributed(freed, message):
    slots = Slots("pages", 4)
    mine, theirs = slots.take_ids(2, ALICE), slots.take_ids(1, BOB)
    with pytest.raises(LedgerError, match=message):
        slots.return_ids(freed(mine, theirs), ALICE)


def test_a_double_free_is_caught():
    slots = Slots("pages", 4)
    taken = slots.take_ids(2, ALICE)
    slots.return_ids(taken, ALICE)
    with pytest.raises(LedgerError, match=r"double free of slot \d by request 1"):
        slots.return_ids(taken, ALICE)


def test_in_production_violations_are_counted_and_logged_and_the_pool_stays_whole(caplog):
    slots = Slots("pages", 4, ledger=Ledger.COUNT)
    mine, theirs = slots.take_ids(2, ALICE), slots.take_ids(1, BOB)
    slots.return_ids(np.concatenate([mine, mine, theirs, ids(PAD, 9)]), ALICE)
    slots.return_ids(mine, ALICE)
    assert slots.num_violations == 5  # the ones outside, the foreign one, the repeats, and each of the second free
    assert [line.split(" what=")[0] for line in caplog.messages] == ["ledger_violation pool=pages"] * 5
    slots.audit([Holder(BOB, theirs)])
    assert slots.num_free == 3


def test_without_a_ledger_slots_still_come_and_go():
    slots = Slots("pages", 4, ledger=Ledger.OFF)
    taken = slots.take_ids(3, ALICE)
    slots.transfer(taken, ALICE, CACHE)
    slots.return_ids(taken, ALICE)
    with slots.group(2):
        slots.take_ids(1, ALICE)
    assert slots.num_free == 3


def test_a_transfer_changes_who_may_free():
    slots = Slots("pages", 4)
    taken = slots.take_ids(2, ALICE)
    slots.transfer(taken, ALICE, CACHE)
    slots.audit([Holder(CACHE, taken)])
    with pytest.raises(LedgerError, match="foreign"):
        slots.transfer(taken, ALICE, BOB)


def test_quarantined_slots_never_come_back_until_clear():
    slots = Slots("pages", 3, ledger=Ledger.COUNT)
    lost = slots.take_ids(1, ALICE)
    slots.quarantine(lost, ALICE, "leaked")
    slots.audit([])
    assert (slots.num_free, slots.num_quarantined, slots.num_violations) == (2, 1, 1)
    assert lost[0] not in slots.take_ids(2, BOB)
    slots.clear()
    assert (slots.num_free, slots.num_quarantined) == (3, 0)
    assert slots.owner[PAD] == QUARANTINE


# -- audit ------------------------------------------------------------------------------------------------------------


def test_audit_finds_a_leak():
    slots = Slots("pages", 4)
    slots.take_ids(1, ALICE)
    with pytest.raises(LedgerError, match="booked for request 1 but held by nobody"):
        slots.audit([])


def test_audit_finds_two_holders_of_one_slot():
    slots = Slots("pages", 4)
    taken = slots.take_ids(1, ALICE)
    with pytest.raises(LedgerError, match="another holder"):
        slots.audit([Holder(ALICE, taken), Holder(BOB, taken)])


def test_audit_finds_a_corrupted_free_list():
    slots = Slots("pages", 4)
    slots._stack[0] = slots._stack[1]
    with pytest.raises(LedgerError, match="free list"):
        slots.audit([])


def test_audit_finds_a_free_slot_that_the_free_list_forgot():
    slots = Slots("pages", 4)
    slots._top -= 1
    with pytest.raises(LedgerError, match="booked for the free list but held by nobody; 1 slots"):
        slots.audit([])


# -- groups (C7) ------------------------------------------------------------------------------------------------------


def test_single_slots_come_from_the_group_and_the_rest_returns_when_it_ends():
    slots = Slots("states", 6)
    with slots.group(3):
        first = slots.take_ids(1, ALICE)
        assert slots.num_free == 5
        slots.audit([Holder(ALICE, first)])
    assert slots.num_free == 5
    slots.audit([Holder(ALICE, first)])


def test_a_used_up_group_falls_through():
    slots = Slots("states", 4)
    with slots.group(1):
        taken = np.concatenate([slots.take_ids(1, ALICE) for _ in range(4)])
    assert sorted(taken.tolist()) == [1, 2, 3, 4]


def test_a_large_request_inside_a_group_may_use_the_groups_slots():
    slots = Slots("states", 4)
    with slots.group(3):
        assert len(slots.take_ids(4, ALICE)) == 4
    assert slots.num_free == 0


def test_a_large_request_that_fits_leaves_the_group_alone():
    slots = Slots("states", 8)
    with slots.group(3):
        slots.take_ids(2, ALICE)
        assert slots.take_ids(1, ALICE).tolist() == [3]
    assert slots.num_free == 5


def test_a_group_takes_only_what_there_is():
    slots = Slots("states", 2)
    with slots.group(5):
        assert slots.num_free == 2


def test_leaving_a_group_by_an_exception_returns_its_slots():
    slots = Slots("states", 4)
    with contextlib.suppress(RuntimeError), slots.group(3):
        raise RuntimeError
    assert slots.num_free == 4
    assert not len(slots.held_by(GROUP))
    slots.audit([])


def test_nested_and_repeated_begins_lose_nothing():
    slots = Slots("states", 6)
    slots.alloc_group_begin(2)
    slots.alloc_group_begin(3)
    with slots.group(2):
        slots.alloc_group_begin(1)
    slots.alloc_group_end()
    slots.alloc_group_end()
    assert slots.num_free == 6
    slots.audit([])


def test_an_id_beyond_the_pool_is_not_taken_for_the_last_slot():
    slots = Slots("test", 4, ledger=Ledger.COUNT)
    mine = slots.take_ids(4, 7)
    slots.return_ids(ids(5), 7)
    slots.transfer(ids(5), 7, CACHE)
    assert slots.num_violations == 2
    slots.audit([Holder(7, mine)])

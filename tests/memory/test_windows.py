"""Window pages, found through full pages."""

import numpy as np
import pytest

from forebay.memory.draft import Draft
from forebay.memory.kinds.kind import Kinds
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.radix_cache import RadixCache
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import CACHE, Holder, OutOfSlots, Slots

ALICE, BOB = 1, 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make(num_window_pages: int = 6, page_size: int = 4, window: int = 6) -> Windows:
    pool = Windows(num_window_pages, 20, ReqToTokenPool(1, 80, page_size=page_size), window=window)
    RadixCache(Slots("kv", 20), page_size, kinds=Kinds([pool]))  # whose shares it then counts
    return pool


@pytest.mark.parametrize(
    ("kv_len", "first"),
    # The query at position kv_len reads itself and the 5 tokens before it.
    [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2)],
)
def test_the_first_page_a_query_reads(kv_len, first):
    assert make().map.first_needed(kv_len) == first


def test_c5_the_padding_page_is_never_handed_out_and_translates_to_itself():
    pool = make(num_window_pages=3)
    pool.take(ids(4, 5, 6), ALICE)
    assert sorted(pool.map.full_to_window[[4, 5, 6]].tolist()) == [1, 2, 3]
    assert pool.map.full_to_window[0] == 0


def test_nothing_is_taken_when_there_are_too_few():
    pool = make(num_window_pages=2)
    with pytest.raises(OutOfSlots, match="window"):
        pool.take(ids(1, 2, 3), ALICE)
    assert not pool.map.full_to_window.any()


def test_detached_windows_are_the_callers_to_return():
    pool = make()
    pool.take(ids(1, 2, 3), ALICE)
    windows = pool.map.detach(ids(1, 2))
    assert pool.map.is_there(ids(1, 2, 3)).tolist() == [False, False, True]
    pool.slots.audit([Holder(ALICE, np.concatenate([windows, pool.map.full_to_window[[3]]]))])
    assert len(pool.map.detach(ids(1, 2))) == 0
    pool.slots.return_ids(windows, ALICE)
    assert pool.slots.num_free == 5


def test_locked_windows_are_not_evicted_until_the_last_reader_has_gone():
    pool = make()
    pool.take(ids(1, 2, 3), ALICE)
    pool.in_tree.give_to_cache(ids(1, 2, 3), ALICE)
    pool.map.lock(ids(2, 3))
    pool.map.lock(ids(3))
    assert (pool.num_cached, pool.in_tree.num_evictable) == (3, 1)
    assert pool.in_tree.evict_from(ids(1, 2, 3), 3) == 1
    pool.map.unlock(ids(2, 3))
    assert pool.in_tree.evict_from(ids(1, 2, 3), 3) == 1
    pool.map.unlock(ids(3))
    assert pool.in_tree.evict_from(ids(1, 2, 3), 3) == 1
    assert pool.slots.num_free == 6


def test_unlocking_more_often_than_locking_is_found():
    pool = make()
    pool.take(ids(1), ALICE)
    with pytest.raises(AssertionError, match="more often"):
        pool.map.unlock(ids(1))


def test_the_cache_takes_over_windows_that_it_had_lost():
    pool = make()
    pool.take(ids(1, 2), ALICE)
    pool.in_tree.give_to_cache(ids(1, 2), ALICE)
    pool.in_tree.evict_from(ids(1), 1)
    pool.map.lock(ids(2))
    pool.take(ids(11, 12), BOB)
    window = int(pool.map.full_to_window[11])
    assert pool.in_tree.replaced([], ids(1, 2), ids(11, 12), BOB).tolist() == [1]
    assert pool.map.full_to_window[1] == window
    assert pool.map.is_there(ids(11, 12)).tolist() == [False, True]
    assert pool.slots.owner[window] == CACHE
    assert pool.num_cached == 2


def test_c18_c22_of_two_copies_of_a_window_page_the_cache_keeps_the_one_that_begins_first():
    """What arrived from another engine may begin inside its first page."""
    pool = make()
    pool.take(ids(1, 2), ALICE)
    pool.map.begins[[1, 2]] = 2, 1
    pool.in_tree.give_to_cache(ids(1, 2), ALICE)
    pool.map.lock(ids(1, 2))
    pool.take(ids(11, 12), BOB)
    pool.map.begins[[11, 12]] = 1, 2
    theirs, ours = pool.map.full_to_window[[1, 11]].tolist()
    assert pool.in_tree.replaced([], ids(1, 2), ids(11, 12), BOB).tolist() == [1]
    assert pool.map.full_to_window[[1, 11]].tolist() == [ours, theirs]
    assert pool.map.begins[[1, 2, 11, 12]].tolist() == [1, 1, 2, 2]
    assert pool.slots.owner[[ours, theirs]].tolist() == [CACHE, BOB]
    assert pool.num_cached == 2


@pytest.mark.parametrize("reader", [False, True])
def test_c18_of_two_equal_copies_the_cache_keeps_the_request_s_and_frees_one_without_readers(reader):
    """The request goes on reading what it read: it never holds two windows for a page, unless another reads one."""
    pool = make()
    pool.take(ids(1, 2), ALICE)
    pool.in_tree.give_to_cache(ids(1, 2), ALICE)
    if reader:
        pool.map.lock(ids(1, 2))
    pool.take(ids(11, 12), BOB)
    theirs, ours = pool.map.full_to_window[[1, 2]].tolist(), pool.map.full_to_window[[11, 12]].tolist()
    num_free = pool.slots.num_free
    assert pool.in_tree.replaced([], ids(1, 2), ids(11, 12), BOB).tolist() == ([] if reader else [1, 2])
    assert pool.map.full_to_window[[1, 2]].tolist() == (theirs if reader else ours)
    assert pool.map.full_to_window[[11, 12]].tolist() == (ours if reader else [0, 0])
    assert pool.slots.num_free == num_free + 2 * (not reader)
    assert pool.num_cached == 2
    held = Holder(CACHE, ids(*(theirs if reader else ours))), Holder(BOB, pool.map.detach(ids(11, 12)))
    pool.slots.audit(held)


def test_a_plan_writes_each_changed_page_once_as_it_is_now():
    pool = make()
    draft = Draft(1, ReqToTokenPool(1, 80, page_size=4))
    pool.grow(ids(1, 2), ALICE, draft)
    pool.slots.return_ids(pool.map.detach(ids(2)), ALICE)
    pool.grow(ids(2, 3), BOB, draft)
    columns = pool.columns(draft, ids())
    assert columns["map_pages"].tolist() == [1, 2, 3]
    assert columns["map_windows"].tolist() == pool.map.full_to_window[[1, 2, 3]].tolist()


def test_after_a_failure_every_window_that_is_there_is_told_again():
    pool = make()
    pool.take(ids(2, 5), ALICE)
    draft = Draft(1, ReqToTokenPool(1, 80, page_size=4))
    pool.start_over(draft)
    assert draft.remapped.tolist() == [2, 5]

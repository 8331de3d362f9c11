"""Going over the whole prefix tree a few nodes at a time, while it changes."""

from __future__ import annotations

import numpy as np

from forebay.engine.frames import GetTree
from forebay.engine.loop.surveys import MAX_PARTS, NODES_PER_PART, Surveys
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import Branch
from forebay.memory.radix_survey import survey
from forebay.memory.slots import Slots

ALICE = 1


def key(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def cache_of(*prompts: tuple[int, ...], num_pages: int = 100, namespace: str = "") -> RadixCache:
    """Of pages of one token."""
    slots = Slots("kv", num_pages)
    cache = RadixCache(slots, 1)
    for prompt in prompts:
        pages = slots.take_ids(len(prompt), ALICE)
        adoption = cache.insert(key(*prompt), pages, ALICE, namespace)
        slots.return_ids(pages[: len(adoption.replaced)], ALICE)
    return cache


def looked_at(cache: RadixCache) -> list[Branch | None]:
    return list(survey(cache.index, b"k", float))


def test_every_node_comes_once_and_behind_its_parent() -> None:
    found = looked_at(cache_of((1, 2, 3), (1, 2, 4), (5,)))
    assert sorted(branch.num_pages for branch in found if branch) == [0, 1, 1, 1, 2]
    names: set[bytes] = set()
    for branch in found:
        assert branch is not None
        assert branch.parent in names or not branch.parent
        assert branch.name not in names
        names.add(branch.name)


def test_names_are_the_same_after_a_split_and_under_no_other_key() -> None:
    cache = cache_of((1, 2, 3, 4))
    before = {branch.name for branch in looked_at(cache) if branch}
    pin = cache.pin(cache.index.match(key(1, 2)))
    after = {branch.name for branch in looked_at(cache) if branch}
    assert before < after
    assert before.isdisjoint(branch.name for branch in survey(cache.index, b"other", float) if branch)
    cache.unpin(pin)


def test_what_goes_meanwhile_is_passed_over_and_what_is_split_is_whole() -> None:
    cache = cache_of((1, 2), (1, 3), (5,), (9, 8, 7))
    passing = survey(cache.index, b"k", float)
    root, first = next(passing), next(passing)
    assert root is not None
    assert first is not None
    cache.pin(cache.index.match(key(9)))
    cache.evict(6)  # all but the pinned one
    assert [branch and branch.num_pages for branch in passing] == [None, 1]


def test_no_part_of_ten_thousand_nodes_takes_more_than_its_share() -> None:
    wide = [(1, 100 + i) for i in range(5_000)]
    deep = [(2, *(3 for _ in range(i)), 4) for i in range(100)]
    alone = [(10_000 + i,) for i in range(5_000)]
    cache = cache_of(*wide, *deep, *alone, num_pages=20_000)
    surveys, found, more = Surveys(cache), list[Branch](), True
    while more:
        part = surveys.part(GetTree(begin=not found), 0.0)
        assert len(part.branches) <= NODES_PER_PART
        more, found = part.more, found + part.branches
    assert len(found) == sum(1 for _ in cache.index.nodes()) > 10_000
    assert sum(branch.num_pages for branch in found) == cache.num_pages
    assert not part.is_cut


def test_a_tree_beyond_all_parts_is_cut_and_said_to_be() -> None:
    cache = cache_of(*((i,) for i in range(3 * NODES_PER_PART)), num_pages=1000)
    surveys = Surveys(cache)
    assert surveys.part(GetTree(begin=True), 0.0).more
    surveys._num_left = 1
    last = surveys.part(GetTree(), 0.0)
    assert (last.more, last.is_cut, len(last.branches)) == (False, True, NODES_PER_PART)
    assert surveys.part(GetTree(), 0.0).branches == []
    assert MAX_PARTS * NODES_PER_PART > 10_000


def test_a_use_is_as_long_ago_as_the_note_behind_it() -> None:
    cache = cache_of((1,), (2,))
    surveys = Surveys(cache)

    def idle_s(now: float) -> list[float]:
        return sorted(branch.idle_s for branch in surveys.part(GetTree(begin=True), now).branches if branch.num_pages)

    cache.unpin(cache.pin(cache.index.match(key(1))))
    surveys.note(10.0)
    surveys.note(20.0)  # nothing was used since
    cache.unpin(cache.pin(cache.index.match(key(2))))
    assert idle_s(25.0) == [0.0, 15.0]
    surveys.note(30.0)
    assert idle_s(32.0) == [2.0, 22.0]

"""Tiers of the prefix cache: spans of slots that are taken, written and attached, and what is missing (C18, C19)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from forebay.config.engine_config import Ledger
from forebay.memory.kinds.kind import Kept, Kinds
from forebay.memory.kinds.state.cached_states import CachedStates, StateTier
from forebay.memory.kinds.state.hybrid_rows import STATE, MambaPool
from forebay.memory.kinds.window.cached_windows import WINDOW, CachedWindows, WindowMap, WindowTier
from forebay.memory.radix_cache import RadixCache
from forebay.memory.slots import LOADING, Slots, as_ids
from forebay.memory.tier import DISK, HOST, Prefix, Span, Tier, TierKind, missing, untiered

PAGE = 2
READ = 6  # tokens of a window
MOVER = "host_store"  # by which the slots were written


def prefix(num_pages: int, first: int = 0, namespace: str = "") -> Prefix:
    tokens = np.arange(first, first + num_pages * PAGE, dtype=np.int32)
    return Prefix(tokens.tobytes(), namespace, "author", "tenant")


def tier(name: str = HOST, pages: int = 20, states: int = 4, windows: int = 20) -> Tier:
    """Over pages of 2 tokens, states and windows of 6 tokens."""
    window_map = WindowMap(windows, pages, page_size=PAGE, window=READ, ledger=Ledger.RAISE)
    parts = [StateTier(CachedStates(MambaPool(states))), WindowTier(CachedWindows(window_map))]
    kinds, kv = Kinds(map(TierKind, parts)), Slots(name, pages)
    return Tier(name, kv, RadixCache(kv, PAGE, kinds=kinds), {part.name: part for part in kinds.tiered})


def span(num_pages: int, start: int = 0, states: tuple[int, ...] = (), windows: tuple[int, ...] = ()) -> Span:
    """A span of another tier, whose slots are numbered from 50 on."""
    ends = {STATE: as_ids(states), WINDOW: as_ids(windows)}
    kept = {name: Kept(of, of + 50) for name, of in ends.items()}
    return Span(prefix=prefix(num_pages), start=start, pages=np.arange(start, num_pages) + 50, kept=kept)


def store(target: Tier, like: Span) -> None:
    taken = target.take(like)
    assert taken is not None
    assert target.attach(taken, MOVER)


def check(target: Tier, **kept: int) -> None:
    """All slots are free or the tree's, and so many are."""
    target.cache.check([])
    target.kv.audit([target.cache.holder()])
    assert target.cache.num_pages == kept.pop("pages")
    for part in target.parts.values():
        part.in_tree.slots.audit([part.in_tree.cached(target.cache.index.nodes())])
    free = {name: part.in_tree.slots.num_free for name, part in target.parts.items()}
    assert {name: target.parts[name].in_tree.slots.capacity - count for name, count in kept.items()} == free


def ends_of(found: Span) -> Mapping[str, list[int]]:
    return {name: kept.ends.tolist() for name, kept in found.kept.items()}


def test_tier_is_durable_in_files_alone_and_writable_at_first() -> None:
    assert [(tier(name).durable, tier(name).writable()) for name in (HOST, DISK)] == [(False, True), (True, True)]


def test_span_has_its_slots_by_kind_and_a_head() -> None:
    whole = span(8, start=2, states=(3, 5, 8), windows=(2, 6, 7))
    assert whole.stop == 8
    assert {name: ids.tolist() for name, ids in whole.slots.items()} == {
        "kv": [52, 53, 54, 55, 56, 57],
        STATE: [53, 55, 58],
        WINDOW: [52, 56, 57],
    }
    head = whole.head(4, PAGE * 4)
    assert (head.start, head.stop, head.prefix) == (2, 6, prefix(6))
    assert head.pages.tolist() == [52, 53, 54, 55]
    assert ends_of(head) == {STATE: [3, 5], WINDOW: [2, 6]}
    assert [kept.slots.tolist() for kept in head.kept.values()] == [[53, 55], [52, 56]]


def test_take_books_the_slots_for_a_load_and_give_back_frees_them() -> None:
    target = tier()
    taken = target.take(span(5, states=(3, 5), windows=(4, 5)))
    assert taken is not None
    assert len(target.kv.held_by(LOADING)) == 5
    assert [len(part.in_tree.slots.held_by(LOADING)) for part in target.parts.values()] == [2, 2]
    assert ends_of(taken) == {STATE: [3, 5], WINDOW: [4, 5]}
    target.give_back(taken)
    check(target, pages=0, state=0, window=0)


def test_take_evicts_as_much_as_it_needs_and_takes_nothing_if_that_is_too_little() -> None:
    target = tier(pages=6)
    store(target, Span(prefix=prefix(1, first=50), start=0, pages=as_ids([1]), kept={}))
    store(target, span(3))
    other = Span(prefix=prefix(3, first=100), start=0, pages=as_ids([1, 2, 3]), kept={})
    taken = target.take(other)
    assert taken is not None
    assert (target.cache.num_pages, target.kv.num_free) == (3, 0)
    assert target.take(Span(prefix=prefix(4), start=0, pages=np.arange(4), kept={})) is None
    assert target.cache.num_pages == 3, "nothing is evicted for a span that does not fit"
    target.give_back(taken)
    held = target.cache.pin_pages(prefix(3).key, 3)
    assert held is not None
    assert target.take(Span(prefix=prefix(4), start=0, pages=np.arange(4), kept={})) is None
    assert target.take(Span(prefix=prefix(3), start=0, pages=np.arange(3), kept={})) is not None


def test_take_makes_room_among_the_slots_of_other_kinds_or_takes_nothing() -> None:
    target = tier(states=2)
    store(target, span(4, states=(2, 4)))
    other = Span(prefix=prefix(3, first=100), start=0, pages=np.arange(3), kept={STATE: Kept(as_ids([3]), as_ids([9]))})
    store(target, other)
    check(target, pages=7, state=2, window=0)
    many = Kept(as_ids([1, 2, 3]), as_ids([7, 8, 9]))
    assert target.take(Span(prefix=prefix(3, first=200), start=0, pages=np.arange(3), kept={STATE: many})) is None
    assert not len(target.kv.held_by(LOADING))


def test_attached_span_is_found_with_its_states_and_windows() -> None:
    target = tier()
    store(target, span(8, states=(3, 8), windows=(5, 6, 7, 8)))
    nodes, pages = target.walk(prefix(8))
    assert len(pages) == 8
    assert {name: part.kept(nodes, pages).ends.tolist() for name, part in target.parts.items()} == {
        STATE: [3, 8],
        WINDOW: [5, 6, 7, 8],
    }
    assert {node.origin.mover for node in nodes} == {MOVER}
    assert target.walk(prefix(8, namespace="other")) == ([], pytest.approx(np.empty(0)))
    check(target, pages=8, state=2, window=4)


def test_attach_frees_what_the_tree_has_already() -> None:
    target = tier()
    store(target, span(5, states=(5,), windows=(4, 5)))
    store(target, span(8, states=(5, 8), windows=(4, 5, 6, 7, 8)))
    check(target, pages=8, state=2, window=5)
    store(target, span(3, states=(3,)))
    check(target, pages=8, state=3, window=5)


def test_attach_behind_pages_that_were_evicted_meanwhile_frees_all() -> None:
    target = tier()
    taken = target.take(span(8, start=4, states=(6, 8), windows=(7, 8)))
    assert taken is not None
    assert not target.attach(taken, MOVER)
    check(target, pages=0, state=0, window=0)


def test_attach_behind_pages_that_are_there_extends_them() -> None:
    target = tier()
    store(target, span(4))
    store(target, span(8, start=4, states=(2, 6, 8), windows=(7, 8)))
    nodes, pages = target.walk(prefix(8))
    assert target.parts[STATE].kept(nodes, pages).ends.tolist() == [2, 6, 8]
    check(target, pages=8, state=3, window=2)


def test_cleared_tier_has_all_slots_free() -> None:
    target = tier()
    store(target, span(8, states=(3, 8), windows=(7, 8)))
    target.clear()
    check(target, pages=0, state=0, window=0)
    assert (target.kv.num_free, target.walk(prefix(8))[0]) == (20, [])


def missed(source: Tier, target: Tier, num_pages: int = 8, known: int = 0, *, whole: bool) -> Span | None:
    here = prefix(num_pages)
    return missing(source, target, here, here._replace(tenant="other"), whole=whole, known=known)


@pytest.fixture
def source() -> Tier:
    found = tier("source")
    store(found, span(8, states=(3, 5, 8), windows=tuple(range(1, 9))))
    return found


def test_missing_whole_prefix_is_all_that_the_source_keeps(source: Tier) -> None:
    found = missed(source, tier(), whole=True)
    assert found is not None
    assert (found.start, found.stop, found.prefix.tenant) == (0, 8, "other")
    assert found.pages.tolist() == source.walk(prefix(8))[1].tolist()
    assert ends_of(found) == {STATE: [3, 5, 8], WINDOW: list(range(1, 9))}


def test_missing_for_a_request_is_what_it_reads_at_the_end(source: Tier) -> None:
    found = missed(source, tier(), whole=False)
    assert found is not None
    assert ends_of(found) == {STATE: [8], WINDOW: [6, 7, 8]}, "6 tokens before the next one lie in three pages"


def test_missing_is_nothing_if_the_source_lacks_a_page_or_the_target_none(source: Tier) -> None:
    assert missed(source, tier(), num_pages=9, whole=True) is None
    assert missed(tier(), tier(), whole=False) is None
    target = tier()
    store(target, span(8, states=(3, 5, 8), windows=tuple(range(1, 9))))
    assert missed(source, target, whole=True) is missed(source, target, whole=False) is None


def test_missing_begins_behind_the_pages_of_the_target_or_at_its_first_window_that_is_read(source: Tier) -> None:
    target = tier()
    store(target, span(4, states=(3,), windows=(1, 2, 3, 4)))
    found = missed(source, target, whole=True)
    assert found is not None
    assert (found.start, ends_of(found)) == (4, {STATE: [5, 8], WINDOW: [5, 6, 7, 8]})
    bare = tier()
    store(bare, span(7))
    read = missed(source, bare, whole=False)
    assert read is not None
    assert (read.start, ends_of(read)) == (5, {STATE: [8], WINDOW: [6, 7, 8]})
    assert read.pages.tolist() == source.walk(prefix(8))[1].tolist()[5:]


def test_missing_state_alone_is_copied(source: Tier) -> None:
    target = tier()
    store(target, span(8, states=(3, 5), windows=tuple(range(1, 9))))
    found = missed(source, target, whole=False)
    assert found is not None
    assert (found.start, len(found.pages), ends_of(found)) == (8, 0, {STATE: [8], WINDOW: []})


def test_missing_leaves_out_what_is_on_its_way(source: Tier) -> None:
    found = missed(source, tier(), known=6, whole=True)
    assert found is not None
    assert (found.start, ends_of(found)) == (6, {STATE: [8], WINDOW: [7, 8]})
    assert missed(source, tier(), known=8, whole=True) is None


def test_untiered_kinds_are_those_that_the_cache_keeps_and_no_tier_could() -> None:
    assert untiered(Kinds([TierKind(part) for part in tier().parts.values()])) == []
    states = CachedStates(MambaPool(2))
    assert untiered(Kinds([_Alone(states)])) == [STATE]


class _Alone(TierKind):
    """States of a cache that no tier keeps."""

    def __init__(self, states: CachedStates) -> None:
        self.states, self.slots = states, states.slots

    @property
    def parts(self) -> tuple[object, ...]:
        return (self.states,)

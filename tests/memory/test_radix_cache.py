"""The radix prefix cache (C18 for full KV, C19, C20)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config.engine_config import EvictionPolicy
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_cache import Pin, RadixCache
from forebay.memory.slots import Holder, LedgerError, Slots
from tests.tiers import examples

ALICE, BOB = 1, 2


def key(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


class Rig:
    """A cache over a pool of pages, and short ways to use it."""

    def __init__(self, page_size: int = 2, num_pages: int = 100, policy: EvictionPolicy = EvictionPolicy.LRU) -> None:
        self.slots = Slots("kv", num_pages)
        self.cache = RadixCache(self.slots, page_size, policy=policy)

    def insert(self, *tokens: int, namespace: str = "", owner: int = ALICE) -> np.ndarray:
        """Compute and adopt a prefix; its pages as the cache has them."""
        pages = self.slots.take_ids(len(tokens) // self.cache.page_size, owner)
        adoption = self.cache.insert(key(*tokens), pages, owner, namespace)
        num_replaced = len(adoption.replaced)
        self.slots.return_ids(pages[:num_replaced], owner)
        return np.concatenate([adoption.replaced, pages[num_replaced:]])

    def cached(self, *tokens: int, namespace: str = "") -> int:
        return self.cache.index.match(key(*tokens), namespace).num_tokens

    def reason(self, *tokens: int, namespace: str = "") -> MissReason:
        return self.cache.index.match(key(*tokens), namespace).reason

    def pin(self, *tokens: int, priority: int = 0) -> Pin:
        return self.cache.pin(self.cache.index.match(key(*tokens)), priority=priority)

    def check(self, *pins: Pin) -> None:
        self.cache.check(list(pins))
        self.slots.audit([self.cache.holder()])


def test_a_prefix_is_found_in_whole_pages_with_its_pages():
    rig = Rig(page_size=2)
    pages = rig.insert(1, 2, 3, 4, 5, 6)
    match = rig.cache.index.match(key(1, 2, 3, 4, 5))
    assert match.num_tokens == 4
    assert match.pages.tolist() == pages[:2].tolist()
    assert rig.cached(1) == 0
    assert rig.cached(1, 2, 3, 9, 5, 6) == 2, "the second page parts within"
    rig.check()


def test_a_match_changes_nothing_until_it_is_pinned():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3, 4)
    (node,) = rig.cache.index.roots[""].children.values()
    rig.cache.index.match(key(1, 2, 9))
    assert len(node.pages) == 4
    pin = rig.pin(1, 2, 9)
    assert len(node.pages) == 2
    assert rig.cache.num_evictable == 2
    rig.check(pin)


def test_branches_share_their_prefix_and_duplicates_stay_with_the_request():
    rig = Rig(page_size=1)
    first = rig.insert(1, 2, 3, 4)
    free = rig.slots.num_free
    second = rig.insert(1, 2, 8, 9)
    assert second[:2].tolist() == first[:2].tolist()
    assert rig.slots.num_free == free - 2
    assert rig.cached(1, 2, 3, 4) == rig.cached(1, 2, 8, 9) == 4
    rig.check()


def test_namespaces_never_share():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3, namespace="a")
    assert rig.cached(1, 2, 3, namespace="b") == 0
    assert rig.cached(1, 2, 3) == 0
    assert rig.cached(1, 2, 3, namespace="a") == 3


@pytest.mark.parametrize("seed", range(3))
def test_a5_keys_are_exact_tokens_whatever_any_hash_says(seed):
    """Scorecard A-5: 5,000 lookups against a brute-force oracle; keys are compared, never hashed to an identity."""
    rng = np.random.default_rng(seed)
    rig = Rig(page_size=2, num_pages=4000)
    stored: dict[str, set[bytes]] = {"": set(), "x": set()}
    hits = 0
    for _ in range(5000):
        tokens = rng.integers(0, 3, rng.integers(0, 9))
        namespace = rng.choice(["", "x"])
        data = tokens.astype(np.int32).tobytes()
        whole = [data[:n] for n in range(8, len(data) + 1, 8)]
        expected = max((len(p) // 4 for p in whole if p in stored[namespace]), default=0)
        assert rig.cache.index.match(data, namespace).num_tokens == expected
        hits += expected > 0
        if rng.random() < 0.02:
            rig.insert(*tokens.tolist(), namespace=namespace)
            stored[namespace].update(whole)
    assert hits > 100
    rig.check()


# -- pins and eviction ------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_is_not_evicted_and_its_ancestors_neither():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3, 4)
    rig.insert(1, 2, 8, 9)
    pin = rig.pin(1, 2, 3)
    assert rig.cache.num_evictable == 3
    assert rig.cache.evict(100) == 3
    assert rig.cached(1, 2, 3) == 3
    rig.check(pin)
    rig.cache.unpin(pin)
    assert rig.cache.evict(100) == 3
    assert rig.slots.num_free == 100
    rig.check()


def test_pages_pinned_within_an_edge_are_not_evicted_with_those_behind_them():
    rig = Rig(page_size=2)
    rig.insert(1, 2, 3, 4, 5, 6)
    assert rig.cache.pin_pages(key(1, 2, 9, 9), 2) is None
    pin = rig.cache.pin_pages(key(1, 2, 3, 4), 1)
    assert pin.num_pages == 1
    assert rig.cache.evict(100) == 2
    assert rig.cached(1, 2, 3, 4) == 2
    rig.check(pin)
    rig.cache.unpin(pin)
    assert rig.cache.evict(100) == 1
    rig.check()


def test_a_pinned_leaf_is_not_evicted_although_it_was_next():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3, 4)
    pin = rig.pin(1, 2, 3, 4)
    rig.insert(8, 9)
    assert rig.cache.evict(100) == 2
    assert rig.cached(1, 2, 3, 4) == 4
    rig.check(pin)


@pytest.mark.parametrize("change", ["split", "evict", "clear"])
def test_a_match_is_of_one_state_of_the_tree(change):
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3, 4)
    match = rig.cache.index.match(key(1, 2, 3, 4))
    changes = {"split": lambda: rig.pin(1, 2), "evict": lambda: rig.cache.evict(1), "clear": rig.cache.clear}
    changes[change]()
    with pytest.raises(AssertionError, match="changed since"):
        rig.cache.pin(match)


def test_both_parts_of_a_split_node_stay_pinned():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3, 4)
    pin = rig.pin(1, 2, 3, 4)
    rig.insert(1, 2, 9)
    rig.check(pin)
    assert rig.cache.evict(100) == 1
    assert rig.cached(1, 2, 3, 4) == 4


def test_only_as_much_is_evicted_as_was_asked_for():
    rig = Rig(page_size=2)
    rig.insert(1, 2, 3, 4, 5, 6)
    assert rig.cache.evict(1) == 1
    assert rig.cached(1, 2, 3, 4, 5, 6) == 4
    rig.check()


@pytest.mark.parametrize(
    ("policy", "first_out"),
    [(EvictionPolicy.LRU, 3), (EvictionPolicy.LFU, 2), (EvictionPolicy.PRIORITY, 1)],
)
def test_the_policy_says_who_goes_first(policy, first_out):
    """1 has the lowest priority, 2 was used least often, 3 was used the longest ago."""
    rig = Rig(page_size=1, policy=policy)
    for token in (1, 2, 3):
        rig.insert(token)
    uses = [(3, 5), (3, 5), (3, 5), (2, 5), (1, 0), (1, 0)]
    for token, priority in uses:
        rig.cache.unpin(rig.pin(token, priority=priority))
    rig.cache.evict(1)
    assert [token for token in (1, 2, 3) if not rig.cached(token)] == [first_out]


def test_a_pin_moves_with_what_its_request_computes():
    rig = Rig(page_size=1)
    pin = rig.pin(1, 2)
    pages = rig.slots.take_ids(4, ALICE)
    assert rig.cache.extend_pin(pin, key(1, 2), pages[:2], ALICE).num_adopted == 2
    adoption = rig.cache.extend_pin(pin, key(1, 2, 3, 4), pages[2:], ALICE)
    assert (pin.num_pages, adoption.num_adopted, rig.cache.num_evictable) == (4, 2, 0)
    rig.check(pin)
    rig.cache.unpin(pin)
    rig.check()


def test_two_requests_that_computed_the_same_end_up_with_one_copy():
    rig = Rig(page_size=1)
    pin_a, pin_b = rig.pin(1), rig.pin(1)
    a, b = rig.slots.take_ids(3, ALICE), rig.slots.take_ids(4, BOB)
    rig.cache.extend_pin(pin_a, key(1, 2, 3), a, ALICE)
    adoption = rig.cache.extend_pin(pin_b, key(1, 2, 7, 8), b, BOB)
    assert adoption.replaced.tolist() == a[:2].tolist()
    assert adoption.num_adopted == 2
    rig.cache.check([pin_a, pin_b])
    rig.slots.audit([rig.cache.holder(), Holder(BOB, b[:2])])


def test_adopting_nothing_new_moves_only_the_pin():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3)
    pin = rig.pin(1)
    mine = rig.slots.take_ids(2, BOB)
    assert rig.cache.extend_pin(pin, key(1, 2, 3), mine, BOB).num_adopted == 0
    assert pin.num_pages == 3
    assert rig.cache.extend_pin(pin, key(1, 2, 3), mine[:0], BOB).num_adopted == 0
    rig.cache.check([pin])


def test_pages_of_somebody_else_are_not_adopted():
    rig = Rig(page_size=1)
    theirs = rig.slots.take_ids(1, BOB)
    with pytest.raises(LedgerError, match="foreign"):
        rig.cache.insert(key(1), theirs, ALICE)


def test_flush_forgets_all_that_is_not_pinned():
    rig = Rig(page_size=1)
    rig.insert(1, 2)
    rig.insert(5, 6)
    pin = rig.pin(1, 2)
    assert rig.cache.flush() == 2
    assert rig.reason(5, 6) is MissReason.EMPTY
    rig.cache.unpin(pin)
    assert rig.cache.flush() == 2
    assert not rig.cache.index.roots
    rig.check()


def test_radix_cache_flush_of_many_leaves_goes_on_in_slices_and_spares_later_pages():
    rig = Rig(page_size=1, num_pages=400)
    for i in range(300):
        rig.insert(1000 + i)
    assert rig.cache.begin_flush() == 300
    num_cached = []
    while rig.cache.continue_flush():
        num_cached.append(rig.cache.num_pages)
        rig.insert(2000 + len(num_cached))
        rig.check()
    assert num_cached == [236, 173, 110, 47]
    assert rig.cache.num_pages == 4, "what came after the flush had begun stays"
    assert [rig.cached(2001 + i) for i in range(4)] == [1] * 4
    assert not rig.cache.flushing
    assert not rig.cache.continue_flush()


def test_radix_cache_clear_ends_a_flush():
    rig = Rig(page_size=1, num_pages=400)
    for i in range(300):
        rig.insert(1000 + i)
    rig.cache.begin_flush()
    rig.cache.clear()
    assert not rig.cache.continue_flush()


def test_client_chosen_namespaces_leave_nothing_behind_for_ever():
    rig = Rig(page_size=1)
    for i in range(1000):
        rig.insert(1, 2, namespace=f"tenant-{i}")
        rig.cache.evict(2)
    assert len(rig.cache.index.roots) == 256


def test_radix_cache_leaf_pinned_again_and_again_has_one_entry_among_the_leaves():
    rig = Rig(page_size=1)
    rig.insert(1, 2, 3)
    for _ in range(2000):
        rig.cache.unpin(rig.pin(1, 2, 3))
    assert sum(map(len, rig.cache._leaves._of.values())) == 1
    assert rig.cache.evict(3) == 3


# -- why a prompt was not cached (C20) --------------------------------------------------------------------------------


def test_c20_every_miss_has_its_reason():
    rig = Rig(page_size=2)
    assert rig.reason(1, 2) is MissReason.EMPTY
    assert rig.reason(1) is MissReason.BELOW_PAGE
    rig.insert(1, 2, 3, 4, 5, 6)
    assert rig.reason(1) is MissReason.BELOW_PAGE
    assert rig.reason(1, 2, 3, 4) is MissReason.NONE
    assert rig.reason(1, 2, 3, 4, 5, 6, 7, 8) is MissReason.NOT_CACHED
    assert rig.reason(1, 2, 3, 9) is MissReason.DIVERGED
    assert rig.reason(9, 9) is MissReason.EMPTY
    rig.insert(1, 2, 7, 7)
    assert rig.reason(1, 2, 8, 8) is MissReason.DIVERGED
    rig.cache.unpin(rig.pin(1, 2, 7, 7))
    rig.cache.evict(2)
    assert rig.reason(1, 2, 3, 4) is MissReason.EVICTED


def test_only_so_many_evictions_are_remembered_per_place():
    rig = Rig(page_size=1, num_pages=200)
    rig.insert(0, 1)
    pin = rig.pin(0, 1)
    for token in range(2, 100):
        rig.insert(0, 1, token)
        rig.cache.evict(1)
    assert len(pin.node.tombstones) == 64
    assert rig.reason(0, 1, 99) is MissReason.EVICTED
    assert rig.reason(0, 1, 2) is MissReason.NOT_CACHED


# -- against a model of itself ----------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(data=st.data(), page_size=st.sampled_from([1, 2, 3]), policy=st.sampled_from(list(EvictionPolicy)))
def test_random_use_agrees_with_a_set_of_prefixes(data, page_size, policy):
    """Everything the cache says is there was inserted with those pages; nothing pinned is ever lost."""
    rig = Rig(page_size, num_pages=60, policy=policy)
    truth: dict[tuple[int, ...], int] = {}  # a prefix in whole pages -> the page of its end
    pins: list[tuple[tuple[int, ...], Pin]] = []
    tokens = st.lists(st.integers(0, 2), max_size=10)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["insert", "pin", "unpin", "evict"]))
        if action == "insert":
            wanted = data.draw(tokens)
            wanted = wanted[: len(wanted) // page_size * page_size]
            if len(wanted) // page_size <= rig.slots.num_free:
                pages = rig.insert(*wanted)
                for i, page in enumerate(pages.tolist()):
                    truth[tuple(wanted[: (i + 1) * page_size])] = page
        elif action == "pin":
            wanted = data.draw(tokens)
            match = rig.cache.index.match(key(*wanted))
            found = tuple(wanted[: match.num_tokens])
            expected = [truth[found[: (i + 1) * page_size]] for i in range(len(found) // page_size)]
            assert match.pages.tolist() == expected
            pins.append((found, rig.cache.pin(match)))
        elif action == "unpin" and pins:
            rig.cache.unpin(pins.pop(data.draw(st.integers(0, len(pins) - 1)))[1])
        elif action == "evict":
            rig.cache.evict(data.draw(st.integers(1, 20)))
        rig.check(*[pin for _, pin in pins])
        for found, _ in pins:
            assert rig.cached(*found) == len(found)

"""The prefix cache over recurrent states and sliding windows (C18, C20)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.memory.kinds.kind import Kinds
from forebay.memory.kinds.state.cached_states import CachedStates, RetainedStates
from forebay.memory.kinds.state.hybrid_rows import MambaPool
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import OPERATOR, Match, Node, Pin
from forebay.memory.req_to_token_pool import ReqToTokenPool
from forebay.memory.slots import CACHE, PAD, Slots
from tests.kinds_of import CachedAlone
from tests.tiers import examples

ALICE = 1


def key(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


class Rig:
    """A cache with pages, states (`num_slots`) and windows of `window` tokens (0: none)."""

    def __init__(
        self,
        page_size: int = 1,
        num_slots: int = 8,
        window: int = 0,
        num_pages: int = 100,
        weights=None,
        most_retained: float = 0.0,
    ) -> None:
        self.kv = Slots("kv", num_pages)
        self.states = CachedStates(MambaPool(num_slots)) if num_slots else None
        rows = ReqToTokenPool(1, 100, page_size=page_size)
        self.windows = Windows(num_pages, num_pages, rows, window=window) if window else None
        kinds = [CachedAlone(self.states, RetainedStates(self.states))] if self.states else []
        kinds += [self.windows] if self.windows else []
        self.cache = RadixCache(self.kv, page_size, kinds=Kinds(kinds), weights=weights, most_retained=most_retained)

    def insert(self, tokens: list[int], *state_at: int, **who) -> Pin:
        """Compute and adopt a prefix, with states after so many tokens; the pin at its end, which is let go. `who` says
        whose it is."""
        ps = self.cache.page_size
        pin = self.cache.pin(self.cache.index.match(b""), **who)
        pages = self.kv.take_ids(len(tokens) // ps, ALICE)
        if self.windows:
            self.windows.take(pages, ALICE)
        for end in sorted({*state_at, len(tokens) // ps * ps}):
            part = pages[pin.num_pages : end // ps]
            replaced = self.cache.extend_pin(pin, key(tokens), part, ALICE).replaced
            own = part[: len(replaced)]
            if self.windows:
                self.windows.slots.return_ids(self.windows.map.detach(own), ALICE)
            self.kv.return_ids(own, ALICE)
            if end in state_at:
                self.attach(pin)
        self.cache.unpin(pin)
        return pin

    def attach(self, pin: Pin) -> None:
        assert self.states is not None
        slot = self.states.pool.take_one(ALICE)
        if not self.states.attach(pin, slot, pin.num_pages * self.cache.page_size, ALICE):
            self.states.pool.free(np.array([slot]), ALICE)

    def match(self, tokens: list[int]) -> Match:
        return self.cache.index.match(key(tokens))

    def check(self) -> None:
        self.cache.check([])
        self.kv.audit([self.cache.holder()])
        for kind in self.cache.kinds.attached:
            kind.slots.audit([kind.cached(self.cache.index.nodes())])


A = list(range(100, 120))


def test_c18_a_hit_ends_at_the_deepest_state():
    rig = Rig()
    rig.insert(A, 6, 14)
    assert [rig.match(A[:n]).num_tokens for n in (5, 6, 13, 14, 20)] == [0, 6, 6, 14, 14]
    rig.check()


def test_c20_kv_without_a_state_is_reported_by_kind():
    rig = Rig()
    rig.insert(A, 6)
    match = rig.match(A)
    assert (match.num_tokens, match.kv_tokens, match.resumable["state"]) == (6, 20, 6)
    assert match.reason is MissReason.STATE_MISSING
    assert len(match.pages) == 6


def test_c18_a_split_leaves_the_state_at_the_deeper_end():
    rig = Rig()
    rig.insert(A, 20)
    rig.cache.unpin(rig.cache.pin(rig.cache.index.match(key(A[:20]))))
    rig.insert(A[:10] + [7] * 10, 20)
    assert rig.match(A).num_tokens == 20
    assert rig.match(A[:15]).num_tokens == 0
    assert rig.match(A[:10] + [7] * 10).num_tokens == 20
    rig.check()


def test_c18_a_state_of_another_length_is_not_adopted():
    rig = Rig()
    pin = rig.cache.pin(rig.cache.index.match(b""))
    rig.cache.extend_pin(pin, key(A), rig.kv.take_ids(20, ALICE), ALICE)
    with pytest.raises(AssertionError, match="after 19 tokens"):
        rig.states.attach(pin, rig.states.pool.take_one(ALICE), 19, ALICE)


def test_a_state_that_is_there_already_stays_the_requests():
    rig = Rig(num_slots=2)
    rig.insert(A, 20)
    rig.insert(A, 20)
    assert rig.states.slots.num_free == 1
    rig.check()


def test_useless_states_are_evicted_first_then_ends_then_branching_points():
    rig = Rig()
    rig.insert(A, 5, 12, 20)  # 12 is passed by: whoever comes this way takes 20, or parts at 5
    rig.insert(A[:5] + [7] * 9, 14)
    assert rig.states.evict(1) == 1
    assert rig.match(A[:12]).num_tokens == 5
    rig.cache.unpin(rig.cache.pin(rig.match(A)))  # used now: the other end goes first
    rig.states.evict(1)
    assert rig.match(A[:5] + [7] * 9).num_tokens == 5
    assert rig.match(A).num_tokens == 20
    rig.states.evict(1)
    assert rig.match(A).num_tokens == 5
    assert rig.states.num_evicted == 3
    rig.check()


def test_branching_points_go_before_ends_when_they_are_most_of_what_there_is():
    rig = Rig(num_slots=6)
    for first in (0, 50, 60):
        rig.insert([first, 1, 2], 1)
        rig.insert([first, 3, 4], 1)
    rig.insert([70, 1], 2)
    rig.states.evict(1)
    assert rig.match([70, 1]).num_tokens == 2
    rig.check()


def test_c6_a_locked_state_is_never_evicted():
    rig = Rig()
    pin = rig.insert(A, 20)
    rig.states.lock(pin.node, pin.node.pages)
    assert rig.states.evict(5) == 0
    assert rig.states.num_evictable == 0
    rig.states.unlock(pin.node, pin.node.pages)
    assert rig.states.evict(5) == 1


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_a_match_is_void_when_a_kind_has_lost_something(kind):
    rig = Rig(window=4)
    rig.insert(A, 6, 20)
    match = rig.match(A)
    part = rig.windows.in_tree if kind == "windows" else rig.states
    part.evict(1)
    with pytest.raises(AssertionError, match="changed since"):
        rig.cache.pin(match)


def test_dead_kv_is_counted_and_goes_first():
    rig = Rig()
    rig.insert(A, 20)
    rig.insert([1, 2, 3, 4], 4)  # younger
    rig.states.evict(1)
    assert rig.states.num_dead_pages == 20
    rig.cache.unpin(rig.cache.pin(rig.match([1, 2, 3, 4])))
    rig.insert([5, 6], 2)
    rig.cache.evict(1)
    assert rig.states.num_dead_pages == 0
    assert rig.match(A).kv_tokens == 0
    assert rig.match([1, 2, 3, 4]).num_tokens == 4
    rig.check()


def test_kv_that_nobody_can_go_on_from_goes_before_older_kv_that_can_be_resumed():
    rig = Rig()
    rig.insert([1, 2, 3, 4], 4)
    rig.insert(A)
    rig.cache.evict(1)
    assert rig.match(A).kv_tokens == 0
    assert rig.match([1, 2, 3, 4]).num_tokens == 4


def test_dead_kv_lives_again_when_a_state_is_attached_below_it():
    rig = Rig()
    rig.insert(A, 20)
    rig.states.evict(1)
    rig.insert(A, 20)
    assert rig.states.num_dead_pages == 0
    assert rig.match(A).num_tokens == 20
    assert rig.kv.num_free == 80
    rig.check()


def test_evicting_a_leaf_frees_its_state_and_its_windows():
    rig = Rig(window=4)
    rig.insert(A, 20)
    rig.cache.evict(1)
    assert (rig.kv.num_free, rig.states.slots.num_free, rig.windows.slots.num_free) == (100, 8, 100)
    rig.check()


# -- windows ----------------------------------------------------------------------------------------------------------


def evict_windows(rig: Rig, tokens: list[int], first: int, count: int) -> None:
    """The windows of tokens [first, first + count) go (page size 1)."""
    pages = _all_pages(rig, tokens)[first : first + count]
    assert rig.windows.in_tree.evict_from(pages, count) == count
    rig.windows.in_tree.shares.add("", -count)


def _all_pages(rig: Rig, tokens: list[int]) -> np.ndarray:
    node, found = rig.cache.index.roots[""], []
    data = key(tokens)
    while data:
        node = node.children[data[:4]]
        found.append(node.pages)
        data = data[len(node.key) :]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("first", "count", "resumes"),
    # A query at position n reads tokens n-3..n: at 20 the windows of 17, 18 and 19 are needed.
    [(0, 17, 20), (0, 18, 0), (19, 1, 19), (17, 1, 17), (16, 1, 20), (10, 10, 10), (12, 8, 12)],
)
def test_c18_a_hit_needs_one_whole_window(first, count, resumes):
    rig = Rig(num_slots=0, window=4)
    rig.insert(A)
    evict_windows(rig, A, first, count)
    match = rig.match([*A, 1])
    assert (match.num_tokens, match.kv_tokens, match.resumable["window"]) == (resumes, 20, resumes)
    if resumes < 20:
        assert match.reason is MissReason.WINDOW_MISSING


def test_c18_states_and_windows_must_agree():
    rig = Rig(window=4)
    rig.insert(A, 6, 14, 20)
    evict_windows(rig, A, 12, 7)
    match = rig.match(A)
    assert match.num_tokens == 6
    assert match.resumable == {"window": 12, "state": 20}
    assert match.reason is MissReason.WINDOW_MISSING


def test_windows_of_the_least_recently_used_go_first_and_of_a_node_the_first_ones():
    rig = Rig(num_slots=0, window=4)
    rig.insert(A)
    rig.insert(A[:1] + [7] * 9)
    rig.cache.unpin(rig.cache.pin(rig.match(A)))
    rig.windows.in_tree.evict(25)
    assert rig.match(A[:1] + [7] * 9).num_tokens == 0
    assert rig.match(A).num_tokens == 20
    rig.check()


def test_windows_of_both_parts_of_a_split_node_can_be_evicted_the_upper_ones_first():
    rig = Rig(num_slots=0, window=4)
    rig.insert(A)
    other = A[:10] + [7] * 10
    rig.insert(other)
    assert rig.windows.in_tree.evict(10) == 10
    assert [rig.match(tokens).num_tokens for tokens in (A, other)] == [20, 20], (
        "nobody who goes on needs the upper ones"
    )
    assert rig.match(A[:10]).num_tokens == 0
    assert rig.windows.in_tree.evict(100) == 20
    rig.check()


def test_recomputed_windows_come_back_to_pages_that_had_lost_them():
    rig = Rig(num_slots=0, window=4)
    rig.insert(A)
    evict_windows(rig, A, 0, 20)
    assert rig.match(A).num_tokens == 0
    rig.insert(A)
    assert rig.match(A).num_tokens == 20
    assert rig.kv.num_free == 80
    rig.check()


# -- where a prompt left a cached one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([*A[:13], 1, 2], (13, A[13])),
        (A[:13], (-1, -1)),
        ([*A, 5], (-1, -1)),
        ([9, 9], (0, A[0])),
        ([*A[:10], 7, 7, 3], (12, 7)),
    ],
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_c20_the_first_differing_token_is_found_within_pages_too(page_size, prompt, expected):
    rig = Rig(page_size=page_size, num_slots=0)
    rig.insert(A)
    rig.insert([*A[:10], *[7] * 10])
    assert rig.cache.index.differs(key(prompt)) == expected


def test_c29_where_prompts_part_is_told_of_an_authors_own_only():
    rig = Rig(page_size=4, num_slots=0)
    rig.insert(A, author="alice")
    asked = key([*A[:13], 1, 2])
    assert (
        rig.cache.index.differs(asked, author="alice") == rig.cache.index.differs(asked, author=OPERATOR) == (13, A[13])
    )
    assert rig.cache.index.differs(asked, author="bob") == (-1, -1)
    # Bob's own beside it, which has less in common; then his own behind a beginning that Alice put there.
    rig.insert([*A[:12], 9, 9, 9, 9], author="bob")
    assert rig.cache.index.differs(key([*A[:12], 9, A[13]]), author="bob") == (13, 9)
    assert rig.cache.index.differs(key([*A[:13], 9, 9, 9]), author="bob") == (12, 9)
    assert rig.cache.index.differs(key([*A[:13], 9, 9, 9]), author="alice") == (13, A[13])
    assert rig.cache.index.differs(key([*A[:9], 1]), author="bob") == (-1, -1)  # within what Alice put there first
    assert rig.cache.index.differs(key([*A[:9], 1]), author="alice") == (9, A[9])


# -- against a model --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(data=st.data(), page_size=st.sampled_from([1, 2]), window=st.sampled_from([0, 3]), slots=st.sampled_from([0, 3]))
def test_hits_are_those_of_a_list_of_what_is_there(data, page_size, window, slots):
    rig = Rig(page_size, slots, window, num_pages=30)
    token = st.integers(0, 1)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(token, min_size=page_size, max_size=8))
        whole = len(tokens) // page_size * page_size
        rig.cache.evict(max(0, whole // page_size - rig.kv.num_free))
        states = [n for n in range(page_size, whole + 1, page_size) if slots and data.draw(st.booleans())]
        if states and slots:
            rig.states.evict(max(0, len(states) - rig.states.slots.num_free))
            states = states[: rig.states.slots.num_free]
        rig.insert(tokens, *states)
        if window and data.draw(st.booleans()):
            rig.windows.in_tree.evict(data.draw(st.integers(0, 4)))
        rig.check()
        prompt = data.draw(st.lists(token, max_size=10))
        assert rig.match(prompt).num_tokens == _resumable(rig, prompt, page_size, window, slots)


def _resumable(rig: Rig, prompt: list[int], page_size: int, window: int, slots: int) -> int:
    """Walk the tree token by token: the greatest length at which everything needed is there."""
    node, best, at, pages = rig.cache.index.roots.get(""), 0, 0, []
    while node is not None and len(prompt) - at >= page_size:
        node = node.children.get(key(prompt[at : at + page_size]))
        for i in range(len(node.pages) if node else 0):
            part = key(prompt[at : at + page_size])
            if len(part) < 4 * page_size or node.key[i * 4 * page_size :][: 4 * page_size] != part:
                return best
            pages.append(int(node.pages[i]))
            at += page_size
            last = i == len(node.pages) - 1
            needed = pages[max(0, at - window + 1) // page_size :] if window else []
            whole = all(rig.windows.map.full_to_window[page] != PAD for page in needed)
            if whole and (not slots or (last and rig.states.last_resumable([node], node.pages, len(node.pages)))):
                best = at
    return best


def test_the_cache_owns_what_it_adopted():
    rig = Rig(window=4)
    rig.insert(A, 20)
    assert np.count_nonzero(rig.states.pool.owner == CACHE) == 1
    assert np.count_nonzero(rig.windows.slots.owner == CACHE) == 20
    assert np.count_nonzero(rig.kv.owner == CACHE) == 20


class Noting:
    """A watcher that notes the nodes of which something changed, and how often a node was cut, removed or cleared."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.others: list[str] = []

    def changed(self, node: Node) -> None:
        self.nodes.append(node)

    def split(self, upper: Node, lower: Node) -> None:
        self.others.append("split")

    def removed(self, node: Node) -> None:
        self.others.append("removed")

    def cleared(self) -> None:
        self.others.append("cleared")

    def taken(self) -> list[Node]:
        nodes, self.nodes = self.nodes, []
        return nodes


def test_watcher_learns_of_a_state_that_a_cached_node_gets_and_loses():
    rig, watcher = Rig(), Noting()
    pin = rig.insert(A, 6)
    rig.cache.watcher = watcher
    rig.attach(pin)
    assert watcher.taken() == [pin.node]
    rig.attach(pin)  # the node has a state already
    assert watcher.taken() == []
    rig.states.evict(2)
    assert pin.node in watcher.taken()
    assert watcher.others == []


def test_watcher_learns_of_windows_that_are_evicted_and_replaced():
    rig, watcher = Rig(num_slots=0, window=4), Noting()
    node = rig.insert(A).node
    rig.cache.watcher = watcher
    rig.windows.in_tree.evict(3)
    assert watcher.taken() == [node]
    rig.insert(A)  # brings the windows back
    assert watcher.taken() == [node]
    rig.cache.clear()
    assert watcher.others == ["cleared"]

"""Tenants share what the prefix cache keeps by their weights (C32, decision 51)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.memory.radix_node import IDLE_S, Node, Shares, Tenants
from tests.memory.test_radix_kinds import Rig, key
from tests.tiers import examples

WEIGHTS = {"a": 1, "b": 1, "c": 2}
KINDS = ["pages", "states", "windows"]


class Shared(Rig):
    """A cache of conversations, each under a namespace of its tenant's, and in it a prompt of its own."""

    def __init__(self, **more) -> None:
        super().__init__(**more, weights=WEIGHTS)
        self.talks: list[tuple[str, list[int]]] = []

    def talk(self, tenant: str, num: int = 1, length: int = 4, at: float = 0.0) -> None:
        for _ in range(num):
            tokens = [len(self.talks)] * length
            self.talks.append((tenant, tokens))
            self.insert(tokens, *([length] if self.states else []), tenant=tenant, namespace=tenant, at=at)

    def kept(self, tenant: str) -> int:
        """How many of the tenant's conversations can be gone on from."""
        own = (tokens for owner, tokens in self.talks if owner == tenant)
        return sum(self.cache.index.match(key(tokens), tenant).num_tokens == len(tokens) for tokens in own)

    def part(self, what: str) -> Any:
        return self.windows.in_tree if what == "windows" else self.states

    def shares(self, what: str) -> Shares:
        return self.cache.shares if what == "pages" else self.part(what).shares

    def evict(self, what: str, num: int = 1) -> int:
        return self.cache.evict(num) if what == "pages" else self.part(what).evict(num)


def rig_of(what: str) -> Shared:
    return Shared(num_slots=12 if what == "states" else 0, window=5 if what == "windows" else 0)


def pages_of(what: str, num_talks: int) -> int:
    return num_talks if what == "states" else 4 * num_talks


@pytest.mark.parametrize("what", KINDS)
def test_c32_tenant_that_floods_the_cache_loses_its_own(what: str) -> None:
    rig = rig_of(what)
    rig.talk("b", 3)
    rig.talk("a", 7)
    assert rig.evict(what, pages_of(what, 4)) == pages_of(what, 4)
    assert (rig.kept("a"), rig.kept("b")) == (3, 3)
    rig.check()


def test_c32_two_tenants_lose_alike_once_they_hold_as_much() -> None:
    rig = rig_of("states")
    rig.talk("b", 3)
    rig.talk("a", 7)
    rig.evict("states", 6)
    assert (rig.kept("a"), rig.kept("b")) == (2, 2)


@pytest.mark.parametrize("what", KINDS)
def test_c32_share_of_the_cache_is_that_of_the_weight(what: str) -> None:
    rig = rig_of(what)
    rig.talk("c", 5)
    rig.talk("a", 5)
    rig.evict(what, pages_of(what, 4))
    assert (rig.kept("a"), rig.kept("c")) == (2, 4)


@pytest.mark.parametrize("what", KINDS)
def test_c32_tenant_alone_may_fill_the_cache_and_loses_its_oldest(what: str) -> None:
    rig = rig_of(what)
    rig.talk("a", 8)
    rig.evict(what, pages_of(what, 3))
    kept = [rig.cache.index.match(key(tokens), "a").num_tokens == 4 for _, tokens in rig.talks]
    assert kept == [False] * 3 + [True] * 5


@pytest.mark.parametrize("what", KINDS)
def test_c32_tenant_idle_for_an_hour_loses_first(what: str) -> None:
    rig = rig_of(what)
    rig.talk("b", 2)
    rig.talk("a", 1)
    rig.talk("a", 4, at=IDLE_S)
    rig.evict(what, pages_of(what, 1))
    assert (rig.kept("a"), rig.kept("b")) == (4, 2)
    rig.talk("a", at=IDLE_S + 1)
    rig.evict(what, pages_of(what, 1))
    assert (rig.kept("a"), rig.kept("b")) == (5, 1)


def test_c32_idle_tenant_that_comes_back_has_its_share() -> None:
    rig = rig_of("states")
    rig.talk("b", 3)
    rig.talk("a", 3, at=2 * IDLE_S)
    rig.evict("states")
    assert rig.kept("b") == 2
    rig.talk("b", 1, at=IDLE_S)  # it came long ago, and starts now
    rig.talk("a", 1, at=2 * IDLE_S + 1)
    rig.evict("states")
    assert (rig.kept("a"), rig.kept("b")) == (3, 3)


def test_c32_all_is_lost_if_all_is_wanted() -> None:
    rig = rig_of("states")
    rig.talk("a", 3)
    rig.talk("b", 5)
    assert rig.evict("states", 100) == 8
    assert rig.states.slots.num_free == 12
    rig.check()


@pytest.mark.parametrize("what", KINDS)
def test_c32_slots_in_use_are_passed_over(what: str) -> None:
    rig = rig_of(what)
    rig.talk("b", 2)
    rig.talk("a", 4)
    for tokens in (tokens for tenant, tokens in rig.talks if tenant == "a"):
        match = rig.cache.index.match(key(tokens), "a")
        pin = rig.cache.pin(match, "a", tenant="a")
        for kind in rig.cache.kinds.resumed:
            kind.lock(pin.node, match.pages)
    assert rig.evict(what, 100) == pages_of(what, 2)
    assert (rig.kept("a"), rig.kept("b")) == (4, 0)


def test_c32_state_is_charged_to_the_tenant_that_attached_it() -> None:
    rig = rig_of("states")
    tokens = [*range(8)]
    rig.insert(tokens, 8, tenant="b")
    for length in (2, 4, 6):
        rig.insert([*tokens[:length], 90 + length], length, tenant="a")
    assert rig.states.shares.held == {"a": 3, "b": 1}
    assert rig.cache.shares.held == {"a": 3, "b": 8}
    rig.states.evict(2)
    assert rig.states.shares.held == {"a": 1, "b": 1}
    rig.check()


def test_c32_pages_below_which_another_tenant_goes_on_are_evicted_behind_its_own() -> None:
    rig = Shared(num_slots=0)
    rig.insert([1, 2, 3, 4], tenant="a")
    rig.insert([1, 2, 3, 4, 5], tenant="b")
    rig.insert([9], tenant="b")
    assert rig.cache.evict(6) == 6
    rig.check()


def test_c32_windows_that_come_back_are_charged_again() -> None:
    rig = rig_of("windows")
    rig.talk("b", 1)
    rig.evict("windows", 4)
    assert not rig.windows.in_tree.shares.held["b"]
    rig.insert([0] * 4, tenant="a", namespace="b")
    assert rig.windows.in_tree.shares.held == {"b": 4}
    rig.check()


def test_c32_state_that_nobody_misses_is_one_of_the_tenant_that_would_lose_it() -> None:
    rig = rig_of("states")
    rig.insert([*range(8)], 4, 8, tenant="b", namespace="b")
    assert rig.states.has_useless
    rig.talk("a", 3)
    assert not rig.states.has_useless
    rig.evict("states", 1)
    assert (rig.kept("a"), rig.states.shares.held["b"]) == (2, 2)


def test_c32_clearing_forgets_who_held_what() -> None:
    rig = Shared(window=4)
    rig.talk("a", 3)
    rig.cache.clear()
    rig.kv.clear()
    rig.talk("b", 1)
    assert [rig.shares(what).held for what in KINDS] == [{"b": 4}, {"b": 1}, {"b": 4}]
    rig.check()


def test_c32_flush_spares_what_another_tenant_adds_meanwhile() -> None:
    rig = Shared(num_slots=0, num_pages=900)
    rig.talk("a", 100, length=1)
    rig.cache.begin_flush()
    assert rig.cache.continue_flush()
    rig.talk("b", 200, length=1)
    while rig.cache.continue_flush():
        pass
    assert (rig.kept("a"), rig.kept("b")) == (0, 200)
    rig.check()


def test_c32_turns_sort_only_tenants_that_have_changed() -> None:
    weights = _Counted()
    tenants = Tenants(weights)
    shares = Shares(tenants)
    for i in range(1000):
        shares.add(f"{i}", i + 1)
    next(shares.turns())
    before = weights.num_asked
    shares.add("5", 5000)
    assert next(shares.turns())[0] == "5"
    assert weights.num_asked - before <= 3


class _Counted(dict[str, int]):
    num_asked = 0

    def get(self, *args):
        self.num_asked += 1
        return super().get(*args)


# -- against a model --------------------------------------------------------------------------------------------------

TENANT = st.sampled_from(sorted(WEIGHTS))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), shared=st.booleans())
def test_c32_no_tenant_loses_while_another_holds_more_that_it_could_lose(data, shared: bool) -> None:
    """In one tree or in a tree each; kept and lost one at a time, with some of it in use."""
    rig = Shared(num_slots=8, window=3, num_pages=40)
    locked: list[Callable[[], None]] = []
    for _ in range(data.draw(st.integers(1, 14))):
        _insert(rig, data, shared)
        if data.draw(st.booleans()):
            locked.append(_lock(rig, data))
        elif locked:
            locked.pop(data.draw(st.integers(0, len(locked) - 1)))()
        for what in KINDS:
            if data.draw(st.booleans()):
                _evict_one(rig, what)


def _insert(rig: Shared, data, shared: bool) -> None:
    tenant = data.draw(TENANT)
    tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    while rig.kv.num_free < len(tokens) or rig.windows.slots.num_free < len(tokens):
        if not _evict_one(rig, "pages"):
            return
    ends = data.draw(st.sets(st.integers(1, len(tokens)), max_size=2))
    rig.states.evict(max(0, len(ends) - rig.states.slots.num_free))
    ends = sorted(ends)[: rig.states.slots.num_free]
    rig.insert(tokens, *ends, tenant=tenant, namespace="" if shared else tenant)


def _lock(rig: Shared, data) -> Callable[[], None]:
    namespace = data.draw(st.sampled_from(["", *WEIGHTS]))
    match = rig.cache.index.match(key(data.draw(st.lists(st.integers(0, 1), max_size=6))), namespace)
    pin = rig.cache.pin(match, namespace)
    for kind in rig.cache.kinds.resumed if pin.num_pages else ():
        kind.lock(pin.node, match.pages)

    def unlock() -> None:
        for kind in rig.cache.kinds.resumed if pin.num_pages else ():
            kind.unlock(pin.node, match.pages)
        rig.cache.unpin(pin)

    return unlock


def _evict_one(rig: Shared, what: str) -> int:
    before, loose = Counter(rig.shares(what).held), _loose(rig, what)
    count = rig.evict(what)
    lost = before - rig.shares(what).held
    assert bool(count) == bool(loose)
    if what == "states":
        assert lost.total() == count
    for loser in lost:
        load = Fraction(before[loser], WEIGHTS[loser])
        assert all(Fraction(before[other], WEIGHTS[other]) <= load for other in loose), (what, before, loose, lost)
    for kind in rig.cache.kinds.checked:
        kind.check(rig.cache.index.nodes())
    return count


def _loose(rig: Shared, what: str) -> set[str]:
    """The tenants that have something to lose."""
    nodes: list[Node] = [node for node in rig.cache.index.nodes() if node.parent]
    if what == "pages":
        return {node.tenant for node in nodes if not node.locks and not node.children}
    if what == "states":
        cached = (rig.states._at.get(node) for node in nodes)
        return {state.tenant for state in cached if state and not state.locks}
    windows = rig.windows.map
    return {node.tenant for node in nodes if (windows.is_there(node.pages) & (windows.locks[node.pages] == 0)).any()}

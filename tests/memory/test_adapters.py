"""Slots of adapters: who has one, when it is written, and when it is free again (C8)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.base.errors import Conflict, NotFound, Unavailable
from forebay.memory.adapters import AdapterLoad, Adapters
from forebay.memory.holding import DeferredFree, Holding, Steps
from tests.tiers import examples


class Rig:
    """Adapters over steps that are launched and commit."""

    def __init__(self, num_slots: int = 2) -> None:
        self.steps, self.deferred = Steps(), list[DeferredFree]()
        self.adapters = Adapters(num_slots, self.free)

    def free(self, holding: Holding, number: int) -> None:
        freed = DeferredFree(fence=self.steps.fence(), request_id=number, holdings=(holding,))
        if freed.is_free:
            holding.kind.return_slots(holding, number)
        else:
            self.deferred.append(freed)

    def commit(self) -> None:
        self.steps.committed = self.steps.launched
        for freed in self.deferred:
            freed.holdings[0].kind.return_slots(freed.holdings[0], freed.request_id)
        self.deferred.clear()

    def load(self, name: str, *, replace: bool = False) -> AdapterLoad:
        adapter = self.adapters.begin(name, f"/{name}", replace=replace)
        self.adapters.loaded(adapter)
        return adapter


def test_c8_a_slot_is_free_when_the_last_user_has_ended_and_no_step_references_it() -> None:
    rig = Rig()
    adapter = rig.load("a")
    rig.adapters.enter(adapter)
    rig.steps.launched = 1
    assert rig.adapters.unload("a") is adapter
    assert rig.adapters.slots.num_free == 1
    rig.adapters.leave(adapter)
    assert rig.adapters.slots.num_free == 1, "a step in flight references it"
    assert rig.adapters.draining == [adapter]
    rig.commit()
    assert rig.adapters.slots.num_free == 2
    assert rig.adapters.draining == []


def test_no_request_finds_an_adapter_that_is_loading_or_unloaded() -> None:
    rig = Rig()
    begun = rig.adapters.begin("a", "/a")
    with pytest.raises(NotFound, match="loaded are: none"):
        rig.adapters.named("a")
    rig.adapters.loaded(begun)
    assert rig.adapters.named("a") is begun
    rig.adapters.unload("a")
    with pytest.raises(NotFound, match="'a' is not loaded"):
        rig.adapters.unload("a")


def test_a_name_that_is_loaded_again_has_another_number_and_the_old_one_serves_its_requests() -> None:
    rig = Rig()
    old = rig.load("a")
    rig.adapters.enter(old)
    with pytest.raises(Conflict, match="load_inplace"):
        rig.adapters.begin("a", "/a")
    new = rig.load("a", replace=True)
    assert (new.number, new.slot) != (old.number, old.slot)
    assert new.number > old.number
    assert rig.adapters.named("a") is new
    assert rig.adapters.in_slots() == [new, old]
    rig.adapters.leave(old)
    assert rig.adapters.in_slots() == [new]
    assert rig.adapters.slots.num_free == 1


def test_request_that_names_the_load_it_had_finds_that_load_alone() -> None:
    rig = Rig()
    first = rig.load("a")
    assert rig.adapters.named("a", first.number) is rig.adapters.named("a") is first
    second = rig.load("a", replace=True)
    assert rig.adapters.named("a", second.number) is second
    with pytest.raises(Conflict, match="loaded anew") as caught:
        rig.adapters.named("a", first.number)
    assert caught.value.code == "adapter_lost"


def test_without_a_free_slot_the_error_names_who_holds_them() -> None:
    rig = Rig(num_slots=1)
    adapter = rig.load("busy")
    rig.adapters.enter(adapter)
    with pytest.raises(Conflict, match=r"all 1 slots .* busy \(1 requests\)") as refused:
        rig.adapters.begin("other", "/other")
    assert refused.value.code == "adapter_slots_taken"


def test_unknown_adapter_is_refused_with_the_first_20_names() -> None:
    rig = Rig(num_slots=30)
    for number in range(25):
        rig.load(f"adapter-{number:02}")
    with pytest.raises(NotFound) as refused:
        rig.adapters.named("x" * 300)
    assert refused.value.message == (
        f"the adapter {'x' * 200!a} is not loaded; loaded are: " + ", ".join(f"adapter-{i:02}" for i in range(20))
    )


def test_replacing_without_a_free_slot_waits_for_the_users_of_the_old_one() -> None:
    """C8."""
    rig = Rig(num_slots=1)
    old = rig.load("a")
    rig.adapters.enter(old)
    rig.steps.launched = 1
    new = rig.adapters.begin("a", "/new", replace=True)
    assert rig.adapters.named("a") is old, "its files are being read"
    assert not rig.adapters.take_slot(new)
    with pytest.raises(Unavailable, match="being replaced, once 1 requests") as refused:
        rig.adapters.named("a")
    assert refused.value.code == "adapter_loading"
    with pytest.raises(Conflict, match="all 1 slots"):
        rig.adapters.begin("b", "/b")
    rig.adapters.leave(old)
    assert not rig.adapters.take_slot(new), "a step in flight references it"
    rig.commit()
    with pytest.raises(Conflict, match="all 1 slots"):
        rig.adapters.begin("b", "/b")  # the slot is promised
    assert rig.adapters.take_slot(new)
    rig.adapters.audit({})
    rig.adapters.loaded(new)
    assert rig.adapters.named("a") is new
    assert rig.adapters.in_slots() == [new]


def test_replacing_without_users_takes_the_slot_at_once() -> None:
    rig = Rig(num_slots=1)
    old = rig.load("a")
    new = rig.adapters.begin("a", "/new", replace=True)
    assert rig.adapters.take_slot(new)
    assert new.slot == old.slot
    rig.adapters.failed(new)
    with pytest.raises(NotFound):
        rig.adapters.named("a")
    assert rig.adapters.slots.num_free == 1


def test_replacing_takes_a_slot_that_drains_before_it_retires_the_old_one() -> None:
    rig = Rig(num_slots=2)
    old, other = rig.load("a"), rig.load("b")
    rig.adapters.enter(other)
    rig.adapters.unload("b")
    new = rig.adapters.begin("a", "/new", replace=True)
    assert not rig.adapters.take_slot(new)
    assert rig.adapters.named("a") is old
    rig.adapters.leave(other)
    assert rig.adapters.take_slot(new)
    rig.adapters.loaded(new)
    assert rig.adapters.slots.num_free == 1


def test_a_load_that_waits_and_is_given_up_leaves_its_promise() -> None:
    rig = Rig(num_slots=1)
    old = rig.load("a")
    rig.adapters.failed(rig.adapters.begin("a", "/new", replace=True))
    assert rig.adapters.named("a") is old, "nothing was retired for files that could not be read"
    rig.adapters.enter(old)
    waiting = rig.adapters.begin("a", "/new", replace=True)
    rig.adapters.take_slot(waiting)
    rig.adapters.failed(waiting)
    rig.adapters.leave(old)
    assert rig.load("b").slot == old.slot


def test_a_load_that_fails_leaves_its_slot_and_its_name_free() -> None:
    rig = Rig(num_slots=1)
    rig.adapters.failed(rig.adapters.begin("a", "/a"))
    assert rig.adapters.slots.num_free == 1
    assert rig.load("a").number == 2


def test_clear_frees_the_slots_of_those_that_wait_for_void_steps_alone() -> None:
    rig = Rig()
    gone, used = rig.load("gone"), rig.load("used")
    rig.adapters.enter(used)
    rig.steps.launched = 1
    rig.adapters.unload("gone")
    rig.adapters.unload("used")
    rig.deferred.clear()
    rig.adapters.clear()
    assert rig.adapters.slots.num_free == 1
    assert gone not in rig.adapters.draining
    rig.adapters.audit({used.number: 1})


NAMES = st.sampled_from("abc")


class AdapterMachine(RuleBasedStateMachine):
    """Loads, requests and steps in any order, against what a slot must hold for whoever computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(num_slots=3)
        self.loading: list[AdapterLoad] = []
        self.users: list[AdapterLoad] = []
        self.in_flight: list[AdapterLoad] = []  # of the steps that have not committed
        self.numbers: set[int] = set()

    @rule(name=NAMES, replace=st.booleans())
    def begin(self, name: str, replace: bool) -> None:
        try:
            adapter = self.rig.adapters.begin(name, "/", replace=replace)
        except Conflict:
            return
        assert adapter.number not in self.numbers, "a number came again"
        assert self._is_apart(adapter), "a slot in use is written"
        self.numbers.add(adapter.number)
        self.loading.append(adapter)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        adapter = data.draw(st.sampled_from(self.loading))
        if not fails:
            if not self.rig.adapters.take_slot(adapter):
                return
            assert self._is_apart(adapter), "a slot in use is written"
        self.loading.remove(adapter)
        (self.rig.adapters.failed if fails else self.rig.adapters.loaded)(adapter)

    def _is_apart(self, adapter: AdapterLoad) -> bool:
        return all(other.slot != adapter.slot for other in (*self.users, *self.in_flight))

    @rule()
    def rest(self) -> None:
        """When no request is left, each load that waits finds a slot."""
        for user in self.users:
            self.rig.adapters.leave(user)
        self.users.clear()
        self.commit()
        for adapter in self.loading:
            if not self.rig.adapters.take_slot(adapter):
                self.commit()
                assert self.rig.adapters.take_slot(adapter), "a load waits for ever"

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        try:
            self.rig.adapters.unload(name)
        except (NotFound, Unavailable):
            return

    @rule(name=NAMES)
    def arrive(self, name: str) -> None:
        try:
            adapter = self.rig.adapters.named(name)
        except (NotFound, Unavailable):
            return
        assert adapter not in self.loading
        self.rig.adapters.enter(adapter)
        self.users.append(adapter)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(self.users))
        self.users.remove(adapter)
        self.rig.adapters.leave(adapter)

    @rule()
    def launch(self) -> None:
        self.rig.steps.launched += 1
        self.in_flight += self.users

    @rule()
    def commit(self) -> None:
        self.in_flight.clear()
        self.rig.commit()

    @invariant()
    def the_books_are_right(self) -> None:
        self.rig.adapters.audit(Counter(adapter.number for adapter in self.users))


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)

"""Slots of adapters (LoRA): which an engine has, in which slots of the weights, and which requests use them.

A slot is written while no step can reference it, and freed when no request uses its adapter and no step in flight can
reference it any more (C8). Slot 0 is the padding: requests without an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from forebay.base.errors import Conflict, NotFound, Unavailable
from forebay.config.engine_config import Ledger
from forebay.memory.holding import Holding
from forebay.memory.slots import PAD, Holder, Slots, as_ids

ADAPTER: Final = "adapter"
_SHOWN: Final = 20  # names in an error


@dataclass(slots=True, eq=False, weakref_slot=True)
class AdapterLoad:
    """One load of an adapter. Its `number` is never given again, so that nothing computed with another load is taken
    for this one's.

    `digest` is equal where another engine of the same model adds the same numbers in slots of the same dtype.
    `num_users` are the requests that compute with it, from their arrival to their end. One that is `retired` takes no
    more. `slot` is PAD until there is one."""

    name: str
    path: str
    number: int
    slot: int
    rank: int = 0
    num_bytes: int = 0
    digest: str = ""
    num_users: int = 0
    retired: bool = False


class Change(StrEnum):
    """A change of the adapters that an engine has."""

    BEGIN = "begin"
    TAKE_SLOT = "slot"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOAD = "unload"


class AdapterChanged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="adapter"):
    """A change of the adapter `name`, without its path: a record of the scheduler's journal."""

    change: str
    name: str
    replace: bool = False
    digest: str = ""


class Adapters:
    """The adapters of one engine by name, each in a slot of its own. `free` takes a slot and the number of its adapter,
    and calls `return_slots` once no step in flight can reference the slot. `note` gets each change before it is made.
    """

    def __init__(self, num_slots: int, free: Callable[[Holding, int], None], *, ledger: Ledger = Ledger.RAISE) -> None:
        self.slots = Slots(ADAPTER, num_slots, ledger=ledger)
        self.note: Callable[[AdapterChanged], None] = lambda change: None
        self._free = free
        self._by_name: dict[str, AdapterLoad] = {}  # retired, if a load waits for its slot
        self._loading: dict[str, AdapterLoad] = {}
        self._retired: list[AdapterLoad] = []  # that have their slot still
        self._last_number = 0

    def __iter__(self) -> Iterator[AdapterLoad]:
        """Yield the adapters that requests may name, by name."""
        return iter(sorted(self._by_name.values(), key=lambda adapter: adapter.name))

    def __contains__(self, name: object) -> bool:
        """Return whether requests may name this adapter, or soon may: it is loaded, or being loaded."""
        return name in self._by_name or name in self._loading

    @property
    def accepting(self) -> list[AdapterLoad]:
        """Return the adapters that take requests: a load waits for no slot of these."""
        return [adapter for adapter in self if not adapter.retired]

    def in_slots(self) -> list[AdapterLoad]:
        """Return the adapters whose slots hold something that requests read: those that are loaded, and retired ones
        with users."""
        return [*self.accepting, *(adapter for adapter in self._retired if adapter.num_users)]

    def _all(self) -> list[AdapterLoad]:
        """Return the adapters that have a slot."""
        loading = (adapter for adapter in self._loading.values() if adapter.slot != PAD)
        return [*self.accepting, *loading, *self._retired]

    @property
    def _num_waiting(self) -> int:
        return sum(adapter.slot == PAD for adapter in self._loading.values())

    @property
    def draining(self) -> list[AdapterLoad]:
        """Return the adapters that were unloaded or replaced, and have their slot still."""
        return list(self._retired)

    def named(self, name: str, number: int = 0) -> AdapterLoad:
        """Return the adapter of a name, and with a `number` of that load. Raises NotFound, with the names that there
        are, Conflict for another load, and Unavailable while another load waits for its slot."""
        if (adapter := self._by_name.get(name)) is None:
            names = ", ".join(sorted(self._by_name)[:_SHOWN]) or "none"
            raise NotFound(
                f"the adapter {name[:200]!a} is not loaded; loaded are: {names}", code="model_not_found", param="model"
            )
        if number and adapter.number != number:
            why = f"the adapter {name!a} was loaded anew meanwhile: send the request again"
            raise Conflict(why, code="adapter_lost")
        if adapter.retired:
            raise Unavailable(
                f"the adapter {name!a} is being replaced, once {adapter.num_users} requests that use it have ended: "
                "send the request again",
                code="adapter_loading",
            )
        return adapter

    # -- loading ------------------------------------------------------------------------------------------------------

    def begin(self, name: str, path: str, *, replace: bool = False) -> AdapterLoad:
        """Begin the load of an adapter, which takes a free slot. If there is none, and it is to `replace` that of its
        name, `take_slot` finds one. Raises Conflict if the name is taken, or if there is no slot."""
        self.note(AdapterChanged(Change.BEGIN, name, replace))
        if name in self._loading:
            raise Conflict(f"the adapter {name!a} is being loaded: wait for its answer", code="adapter_loading")
        if name in self._by_name and not replace:
            raise Conflict(
                f"the adapter {name!a} is loaded already: unload it first, or send load_inplace: true",
                code="adapter_loaded",
            )
        is_free = self.slots.num_free > self._num_waiting
        if not is_free and name not in self._by_name:
            held = ", ".join(f"{adapter.name} ({adapter.num_users} requests)" for adapter in self._all())
            raise Conflict(
                f"all {self.slots.capacity} slots for adapters are taken, by {held}: unload one, or restart with "
                "a larger --max-loras",
                code="adapter_slots_taken",
            )
        self._last_number += 1
        slot = self.slots.take_one(self._last_number) if is_free else PAD
        adapter = self._loading[name] = AdapterLoad(name, path, self._last_number, slot)
        return adapter

    def take_slot(self, adapter: AdapterLoad) -> bool:
        """Return whether a load has a slot to write. If no slot becomes free for it otherwise, the adapter that it
        replaces is retired: its requests end with it, and new ones are refused until the load is complete."""
        if adapter.slot != PAD:
            return True
        if self.slots.num_free + len(self._retired) < self._num_waiting:
            replaced = self._by_name.get(adapter.name)
            if replaced is not None and not replaced.retired:
                self.note(AdapterChanged(Change.TAKE_SLOT, adapter.name))
                self._retire(replaced)
        if self.slots.num_free:
            self.note(AdapterChanged(Change.TAKE_SLOT, adapter.name))
            adapter.slot = self.slots.take_one(adapter.number)
        return adapter.slot != PAD

    def is_slot_free(self, adapter: AdapterLoad) -> bool:
        """Return whether `take_slot` would find one at once."""
        return adapter.slot != PAD or self.slots.num_free > 0

    def loaded(self, adapter: AdapterLoad) -> None:
        """Let requests name the adapter, whose slot has been written. One that it replaces serves the requests that it
        has."""
        self.note(AdapterChanged(Change.LOADED, adapter.name, digest=adapter.digest))
        del self._loading[adapter.name]
        replaced = self._by_name.get(adapter.name)
        self._by_name[adapter.name] = adapter
        if replaced is not None and not replaced.retired:
            self._retire(replaced)

    def failed(self, adapter: AdapterLoad) -> None:
        """Free the slot of an adapter that could not be loaded: no request has named it. One that was retired for it
        is gone."""
        self.note(AdapterChanged(Change.FAILED, adapter.name))
        del self._loading[adapter.name]
        if adapter.slot != PAD:
            self.slots.return_ids(as_ids([adapter.slot]), adapter.number)
        if (replaced := self._by_name.get(adapter.name)) is not None and replaced.retired:
            del self._by_name[adapter.name]

    def unload(self, name: str) -> AdapterLoad:
        """Take no more requests for the adapter, which serves those that it has. Raises NotFound."""
        self.note(AdapterChanged(Change.UNLOAD, name))
        adapter = self.named(name)
        del self._by_name[name]
        self._retire(adapter)
        return adapter

    def _retire(self, adapter: AdapterLoad) -> None:
        adapter.retired = True
        self._retired.append(adapter)
        self._release(adapter)

    def repeat(self, changed: AdapterChanged) -> None:
        """Make a change that was noted by another engine. Raises what that raised."""
        match changed.change:
            case Change.BEGIN:
                self.begin(changed.name, "", replace=changed.replace)
            case Change.TAKE_SLOT:
                self.take_slot(self._loading[changed.name])
            case Change.LOADED:
                adapter = self._loading[changed.name]
                adapter.digest = changed.digest
                self.loaded(adapter)
            case Change.FAILED:
                self.failed(self._loading[changed.name])
            case _:
                self.unload(changed.name)

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Give each adapter another name, also those that are being loaded."""
        known = (*self._by_name.values(), *self._loading.values(), *self._retired)
        for adapter in {adapter.number: adapter for adapter in known}.values():
            adapter.name = renamed(adapter.name)
        self._by_name = {renamed(name): adapter for name, adapter in self._by_name.items()}
        self._loading = {renamed(name): adapter for name, adapter in self._loading.items()}

    # -- using --------------------------------------------------------------------------------------------------------

    def enter(self, adapter: AdapterLoad | None) -> None:
        """Count a request that has arrived."""
        if adapter is not None:
            adapter.num_users += 1

    def leave(self, adapter: AdapterLoad | None) -> None:
        """Count a request that has ended."""
        if adapter is not None:
            adapter.num_users -= 1
            self._release(adapter)

    def _release(self, adapter: AdapterLoad) -> None:
        """Free the slot of a retired adapter without users."""
        if adapter.retired and not adapter.num_users:
            self._free(Holding(self, as_ids([adapter.slot])), adapter.number)

    def return_slots(self, holding: Holding, owner: int) -> None:
        """Free the slot of the retired adapter of the number `owner`, which no step references any more."""
        self._retired = [adapter for adapter in self._retired if adapter.number != owner]
        self.slots.return_ids(holding.ids, owner)

    def clear(self) -> None:
        """Free the slots of retired adapters without users: no step is in flight, and no release is deferred."""
        for adapter in [adapter for adapter in self._retired if not adapter.num_users]:
            self.return_slots(Holding(self, as_ids([adapter.slot])), adapter.number)

    # -- checking -----------------------------------------------------------------------------------------------------

    def audit(self, users: Mapping[int, int]) -> None:
        """Raise LedgerError, or fail an assertion, unless each slot has one holder and `users` by number are those that
        are counted."""
        known = self._all()
        self.slots.audit(iter([Holder(adapter.number, as_ids([adapter.slot])) for adapter in known]))
        counted = {adapter.number: adapter.num_users for adapter in known if adapter.num_users}
        assert counted == users, f"adapters count the users {counted}; there are {users}"
        assert all(adapter.slot != PAD for adapter in known), "slot 0 is the padding"

"""The state of an idle scheduler as bytes, from which a replay can begin if older records were overwritten.

A state is a table of the objects that are reached from the scheduler, in the order in which they are found. It is put
into a new scheduler of the same configuration. Objects that this has at the same place are filled in. Nodes of prefix
trees and the like are made anew, of the classes in `_MADE` and of the `entries` of kinds alone. Configuration,
functions and other parts of the program stay those of the new scheduler. Nothing in a state is executed.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
from sortedcontainers import SortedList

from forebay.memory.adapters import AdapterLoad
from forebay.memory.encodings import Encoding, Tile
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node, Origin, Root
from forebay.memory.retention import Retained
from forebay.requests.account import Account
from forebay.scheduler.scheduler import Scheduler

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
MOST_BYTES: Final = 1 << 28  # of a state that is read, before it was compressed
_PACKAGES: Final = ("forebay.memory.", "forebay.scheduler.", "forebay.requests.")  # whose objects have state
# Scratch memory, estimates and paths, which decide nothing, and what a replay brings itself.
_LEFT_OUT: Final = frozenset({"_claimed", "_marks", "ghosts", "journal", "watcher", "_proposer", "_grammars", "path"})
# The parts of a scheduler that have a state.
_OF_SCHEDULER: Final = (
    "queues",
    "memory",
    "ratio",
    "outputs",
    "handoff",
    "chunk_limit",
    "_num_submitted",
)
_MADE: Final = {kind.__qualname__: kind for kind in (Node, Root, Retained, Account, Encoding, Tile, AdapterLoad)}
_VALUES: Final[dict[str, type]] = {kind.__qualname__: kind for kind in (tuple, Origin, MissReason)}
_CONTAINERS: Final[dict[str, type]] = {
    kind.__qualname__: kind for kind in (dict, OrderedDict, Counter, defaultdict, list, deque, set, SortedList)
}
_MAPPINGS: Final = (dict,)
_REFERENCE, _VALUE, _STAYS, _SLICE = 0, 1, 2, 3


class NoMark(Exception):
    """The state has something that cannot be kept, or the bytes are no state of this configuration."""


class NotAtRest(NoMark):
    """The scheduler has something to do."""


class Marks:
    """Takes the states of one scheduler, which is new when this is made."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        taking = _Taking(scheduler)
        self._known = taking.kinds | {*_made_classes(scheduler).values(), *_VALUES.values()}

    def take(self, renamed: Mapping[str, str] = NO_NAMES) -> bytes:
        """Return the state, with these texts replaced. Raises NoMark if the scheduler is not at rest: it has a request,
        a step in flight, a transfer, memory to be released, or something else that a new scheduler has none of."""
        scheduler = self._scheduler
        busy = scheduler.pools.deferred.entries or scheduler.handoff.tickets.num_open or scheduler.flushing
        if busy or not scheduler.idle:
            raise NotAtRest("the scheduler is not at rest")
        taking = _Taking(scheduler, renamed)
        if others := taking.kinds - self._known:
            raise NoMark(f"it has {min(kind.__qualname__ for kind in others)}")
        return zlib.compress(msgspec.msgpack.encode(taking.table), 1)


def put(scheduler: Scheduler, state: bytes) -> None:
    """Give a new scheduler a state. Raises NoMark for bytes that are no state of its configuration."""
    try:
        unpacked = zlib.decompressobj()
        table = msgspec.msgpack.decode(unpacked.decompress(state, MOST_BYTES))
        if not unpacked.eof:
            raise NoMark(f"a state of more than {MOST_BYTES >> 20} MiB, or a part of one")
        _Putting(scheduler, table).run()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, zlib.error, RecursionError) as error:
        raise NoMark(f"this is no state of its scheduler: {error!s:.100}") from error


def texts_of(scheduler: Scheduler) -> frozenset[str]:
    """Return all texts of a scheduler's state, and the names of its kinds."""
    found, left = set[str](), list[Any](_Taking(scheduler).table)
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.add(each)
        elif isinstance(each, list | dict):
            left.extend(each.values() if isinstance(each, dict) else each)
    return frozenset(found)


@cache
def _slots(classes: tuple[type, ...]) -> tuple[str, ...]:
    """Return the attributes in slots of objects that have these classes."""
    found = (getattr(each, "__slots__", ()) for each in classes)
    names = (name for slots in found for name in ([slots] if isinstance(slots, str) else slots))
    return tuple(name for name in names if not name.startswith("__"))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Scheduler):
        yield from ((name, getattr(thing, name)) for name in _OF_SCHEDULER)
        return
    for name in (*_slots(type(thing).__mro__), *getattr(thing, "__dict__", ())):
        if name not in _LEFT_OUT and hasattr(thing, name):
            yield name, getattr(thing, name)


def _made_classes(scheduler: Scheduler) -> dict[str, type]:
    """Return by name the classes whose objects are made anew."""
    return _MADE | {kind.__qualname__: kind for kind in scheduler.pools.kinds.entries}


class _Taking:
    """The table of a scheduler, with texts replaced by those that `renamed` has for them."""

    def __init__(self, scheduler: Scheduler, renamed: Mapping[str, str] = NO_NAMES) -> None:
        self._renamed = renamed
        self._numbers = {id(scheduler): 0}
        self._found: list[Any] = [scheduler]
        self.kinds = set[type]()  # of this package, whose objects were met
        self.table: list[Any] = []
        for thing in self._found:  # which grows
            self.table.append(self._content(thing))

    def _content(self, thing: Any) -> list[Any]:
        kind = type(thing).__qualname__
        if isinstance(thing, np.ndarray):
            return ["ndarray", thing.dtype.str, list(thing.shape), thing.tobytes()]
        if isinstance(thing, array):
            return ["array", thing.typecode, thing.tobytes()]
        if isinstance(thing, _MAPPINGS):
            return [kind, [[self._encoded(key), self._encoded(value)] for key, value in thing.items()]]
        if kind in _CONTAINERS:
            return [kind, [*map(self._encoded, thing)]]
        return [kind, {name: self._encoded(value) for name, value in _attributes(thing)}]

    def _encoded(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str, bytes):
            return self._renamed.get(value, value)
        if isinstance(value, np.generic):
            return value.item()
        kind = type(value)
        if kind.__module__.startswith("forebay."):
            self.kinds.add(kind)
        if isinstance(value, Enum):
            return [_VALUE, kind.__qualname__, value.value] if kind.__qualname__ in _VALUES else [_STAYS]
        if isinstance(value, slice):
            return [_SLICE, value.start, value.stop]
        if isinstance(value, tuple | frozenset):
            return [_VALUE, kind.__qualname__, [*map(self._encoded, value)]]
        if kind.__qualname__ in _CONTAINERS or isinstance(value, np.ndarray | array) or _is_followed(kind):
            return [_REFERENCE, self._number(value)]
        return [_STAYS]

    def _number(self, thing: Any) -> int:
        number = self._numbers.setdefault(id(thing), len(self._found))
        if number == len(self._found):
            self._found.append(thing)
        return number


def _is_followed(kind: type) -> bool:
    return kind.__module__.startswith(_PACKAGES) and not issubclass(kind, msgspec.Struct | type)


class _Putting:
    """Puts a table into a new scheduler."""

    def __init__(self, scheduler: Scheduler, table: list[Any]) -> None:
        self._table = table
        self._things: list[Any] = [None] * len(table)  # by number; None: not met yet
        self._things[0] = scheduler
        self._made_classes = _made_classes(scheduler)
        self._kept = {id(scheduler)}  # of the new scheduler, each with one number

    def run(self) -> None:
        """Fill all things in their order, in which each is met before it is filled."""
        for thing, (kind, *content) in zip(self._things, self._table, strict=True):
            if isinstance(thing, np.ndarray):
                thing[...] = _array_of(content).reshape(thing.shape)
            elif isinstance(thing, _MAPPINGS):
                self._fill_mapping(thing, content[0])
            elif kind in _CONTAINERS:
                old = [*thing] if isinstance(thing, list | deque) else []
                found = [self._decoded(each, old[i] if i < len(old) else None) for i, each in enumerate(content[0])]
                thing.clear()
                (thing.extend if isinstance(thing, list | deque) else thing.update)(found)
            elif not isinstance(thing, array):
                for name, value in content[0].items():
                    object.__setattr__(thing, name, self._decoded(value, getattr(thing, name, None)))

    def _fill_mapping(self, thing: dict[Any, Any], pairs: list[Any]) -> None:
        old, new = dict(thing), {}
        for encoded, value in pairs:
            key = self._decoded(encoded, None)
            new[key] = self._decoded(value, old.get(key))
        thing.clear()
        thing.update(new)

    def _decoded(self, value: Any, old: Any) -> Any:
        """Return a value; `old` is what the new scheduler has in its place."""
        if not isinstance(value, list):
            return value
        what, *content = value
        if what == _REFERENCE:
            return self._met(content[0], old)
        if what == _SLICE:
            return slice(*content)
        if what == _VALUE:
            return self._value(content[0], content[1], old)
        if old is None:
            raise NoMark("it has something that a new scheduler lacks")
        return old

    def _value(self, name: str, items: Any, old: Any) -> Any:
        """Return a value that cannot change; the `old` one if it has the same parts."""
        if name == "frozenset":
            return frozenset(self._decoded(each, None) for each in items)
        kind = _VALUES.get(name, type(old))
        if issubclass(kind, Enum):
            return kind(items)
        olds = old if isinstance(old, tuple) and len(old) == len(items) else [None] * len(items)
        found = [self._decoded(each, before) for each, before in zip(items, olds, strict=True)]
        if type(old).__qualname__ == name and all(one is other for one, other in zip(found, olds, strict=True)):
            return old
        if name not in _VALUES:
            raise NoMark(f"it has another {name!a:.60}")
        return tuple(found) if kind is tuple else kind(*found)

    def _met(self, number: int, old: Any) -> Any:
        """Return the thing with a number: one that was met before, or the `old` one, or a new one."""
        if self._things[number] is None:
            kind, *content = self._table[number]
            if not (self._fits(old, kind, content) and id(old) not in self._kept):
                old = self._made(kind, content)
            self._kept.add(id(old))
            self._things[number] = old
        return self._things[number]

    def _fits(self, old: Any, kind: str, content: list[Any]) -> bool:
        if isinstance(old, np.ndarray) and kind == "ndarray":
            is_alike = old.dtype.str == content[0] and list(old.shape) == content[1]
            return is_alike and old.size > 0 and old.flags.writeable
        return type(old).__qualname__ == kind and kind not in self._made_classes and kind != "array"

    def _made(self, kind: str, content: list[Any]) -> Any:
        if kind == "ndarray":
            return _array_of(content).copy()
        if kind == "array":
            return array(content[0], content[1])
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]()
        if kind not in self._made_classes:
            raise NoMark(f"it has a new {kind!a:.60}")
        made: type[Any] = self._made_classes[kind]
        return object.__new__(made)


def _array_of(content: list[Any]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(content[0])
    if dtype.hasobject:
        raise NoMark("an array of objects")
    return np.frombuffer(content[2], dtype=dtype).reshape(content[1])

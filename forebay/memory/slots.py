"""Integer slots with an ownership ledger, and the handling of violations.

A pool hands out 1..capacity; index 0 is nobody's (see `PAD`). Free slots form a stack, the ledger an array beside it:
`owner[i]` is the holder of slot i. Every operation is a handful of array operations, whatever the number of slots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from forebay.base import log
from forebay.config.engine_config import Ledger

Ids = npt.NDArray[np.int64]

PAD: Final = 0  # the only definition of the padding index: row 0, page 0 and slot 0 are never handed out
NO_SLOT: Final = PAD  # where an id could stand and none does
NO_IDS: Final[Ids] = np.empty(0, dtype=np.int64)


def inside(counts: Ids) -> Ids:
    """Return the place of each entry in its run, for runs of these lengths: [2, 3] -> [0, 1, 0, 1, 2]."""
    places: Ids = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


# Owners: a positive number is a request's id. A free slot holds FREE or less: freeing writes a different value for each
# slot of the call, so that reading them back finds a slot that was passed twice.
NO_OWNER: Final = 0  # in other tables; the ledger has FREE
CACHE: Final = -1
GROUP: Final = -2
QUARANTINE: Final = -3
LOADING: Final = -4  # what a load from another tier of the prefix cache writes, until it is the cache's
FREE: Final = -16

_AUDITED: Final = 4096  # slots looked at together

_log = log.get_logger("memory")


class OutOfSlots(Exception):
    """Not enough free slots; nothing was taken."""

    def __init__(self, name: str, wanted: int, free: int) -> None:
        super().__init__(f"{name}: wanted {wanted} slots, {free} are free")
        self.name, self.wanted, self.free = name, wanted, free


class LedgerError(Exception):
    """A slot was freed twice, freed by another owner, or lost."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Slots that a holder claims, for `Slots.audit`."""

    owner: int
    ids: Ids


class Slots:
    """A pool of `capacity` integer slots.

    `ledger` says what a violation (C8) does: `raise`; `count` (log it, count it, leave the slot with its rightful
    owner, continue); `off` (nothing is recorded or noticed).
    """

    def __init__(self, name: str, capacity: int, *, ledger: Ledger = Ledger.RAISE) -> None:
        self.name, self.capacity, self.ledger = name, capacity, ledger
        # One entry more than there are slots: ids are clipped when they are looked up, and one that is too large must
        # not be taken for the last slot.
        self._fenced: Ids = np.full(capacity + 2, QUARANTINE, dtype=np.int64)
        self.owner: Ids = self._fenced[: capacity + 1]
        self.owner[PAD + 1 :] = FREE
        self.generation: Ids = np.zeros(capacity + 1, dtype=np.int64)
        self.num_violations = 0
        self.num_quarantined = 0
        self._last_generation = 0
        self._stack: Ids = np.arange(capacity, PAD, -1, dtype=np.int64)  # the top is the last entry
        self._top = capacity
        self._group: list[int] = []
        self._drawn: list[int] = []  # slots taken from the group and not booked yet, and for whom
        self._drawn_for: list[int] = []
        self._marks: Ids = FREE - np.arange(capacity + 1, dtype=np.int64)
        # Of `audit`, which runs after MemoryError: it and `clear` take no memory in proportion to the pool.
        self._claimed: Ids = np.zeros(capacity + 1, dtype=np.int64)

    # -- taking and returning -------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that a table over these slots needs: one more than the slots, for the padding row."""
        return self.capacity + 1

    @property
    def num_free(self) -> int:
        """Slots that can be taken; a group's unused ones count (C7)."""
        return self._top + len(self._group)

    def take_ids(self, n: int, owner: int | Ids) -> Ids:
        """Take n slots for `owner` (one id, or one per slot). Raises OutOfSlots and takes none when short."""
        if self._group:
            if n == 1 and isinstance(owner, int):
                return np.array([self.take_one(owner)], dtype=np.int64)
            if n > self._top:
                self.alloc_group_end()
        top = self._top
        if n > top:
            raise OutOfSlots(self.name, n, top)
        ids = self._stack[top - n : top].copy()
        self._top = top - n
        if self.ledger is not Ledger.OFF:
            self.owner[ids] = owner
        # One stamp for the whole call: it differs from every earlier one, and that is all a reader needs.
        self._last_generation += 1
        self.generation[ids] = self._last_generation
        return ids

    def take_one(self, owner: int) -> int:
        """Take one slot; inside a group without touching an array. Raises OutOfSlots when there is none."""
        if not self._group:
            return int(self.take_ids(1, owner)[0])
        slot = self._group.pop()
        self._drawn.append(slot)
        self._drawn_for.append(owner)
        return slot

    def return_ids(self, ids: Ids, owner: int) -> None:
        """Give back slots that `owner` holds."""
        if self._drawn:
            self._book_drawn()
        n = len(ids)
        if self.ledger is not Ledger.OFF:
            marks = self._marks[:n]
            if not _all_are(self._fenced.take(ids, mode="clip"), owner):
                ids = self._rightful(ids, owner)
                n, marks = len(ids), self._marks[: len(ids)]
            self.owner[ids] = marks
            if self.owner.take(ids).tobytes() != marks.tobytes():
                ids = self._without_repeats(ids, owner)
                n = len(ids)
        top = self._top
        self._stack[top : top + n] = ids
        self._top = top + n

    def transfer(self, ids: Ids, giver: int, taker: int) -> None:
        """Hand slots from one owner to another without freeing them."""
        if self.ledger is Ledger.OFF:
            return
        if self._drawn:
            self._book_drawn()
        if not _all_are(self._fenced.take(ids, mode="clip"), giver):
            ids = self._rightful(ids, giver)
        self.owner[ids] = taker

    def claim(self, ids: Ids, owner: int) -> None:
        """Take these slots, which are free. Costs O(capacity)."""
        free = self._stack[: self._top]
        free = free[np.isin(free, ids, invert=True)]
        self._top = len(free)
        self._stack[: self._top] = free
        self.owner[ids] = owner

    def clear(self) -> None:
        """Everything is free again; generations are never reset (C1)."""
        np.subtract(FREE, self._marks[:PAD:-1], out=self._stack)
        self._top = self.capacity
        self._group, self._drawn, self._drawn_for = [], [], []
        self.owner[:] = FREE
        self.owner[PAD] = QUARANTINE
        self.num_quarantined = 0

    # -- allocation groups (C7) -----------------------------------------------------------------------------------

    def alloc_group_begin(self, n: int) -> None:
        """Set up to n slots aside, from which single slots are then taken without touching the arrays."""
        self.alloc_group_end()
        ids = self.take_ids(min(n, self._top), GROUP)
        self._group = ids[::-1].tolist()

    def alloc_group_end(self) -> None:
        """Return the unused slots of the group to the pool; without a group, do nothing."""
        if self._drawn:
            self._book_drawn()
        if self._group:
            left, self._group = np.array(self._group[::-1], dtype=np.int64), []
            self.return_ids(left, GROUP)

    @contextmanager
    def group(self, n: int) -> Iterator[Self]:
        """Reserve `n` slots for allocations within the block, and return the unused ones at its end."""
        self.alloc_group_begin(n)
        try:
            yield self
        finally:
            self.alloc_group_end()

    def _book_drawn(self) -> None:
        """Enter the slots taken from the group in the ledger, all at once: one by one costs ten times as much."""
        if self.ledger is not Ledger.OFF:
            self.owner[self._drawn] = self._drawn_for
        self._drawn.clear()
        self._drawn_for.clear()

    # -- the ledger (C8) ------------------------------------------------------------------------------------------

    def held_by(self, owner: int) -> Ids:
        """The slots that the ledger books for `owner`."""
        self._book_drawn()
        return np.flatnonzero(self.owner == owner)

    def quarantine(self, ids: Ids, owner: int, why: str) -> None:
        """Take slots out of circulation: they are not allocated again until `clear`."""
        self.transfer(ids, owner, QUARANTINE)
        self.num_quarantined += len(ids)
        self._violation(f"{len(ids)} slots quarantined, {why}: {_few(ids)} held by {_name(owner)}")

    def audit(self, holders: Iterable[Holder]) -> None:
        """Raise LedgerError unless the holders hold exactly what the ledger books, and the rest is free.

        Costs O(capacity): for tests and for idle moments, not for every step.
        """
        self._book_drawn()
        claimed = self._claimed
        claimed.fill(NO_OWNER)
        own = Holder(GROUP, as_ids(self._group)), Holder(FREE, self._stack[: self._top])
        for batch in _batches(chain(holders, own)):
            self._claim(batch)
        num_wrong, first = 0, 0
        for part in _ranges(len(claimed)):
            booked = np.maximum(self.owner[part], FREE)
            wrong = np.flatnonzero(claimed[part] != np.where(booked == QUARANTINE, NO_OWNER, booked))
            if len(wrong) and not num_wrong:
                first = part.start + int(wrong[0])
            num_wrong += len(wrong)
        if num_wrong:
            raise LedgerError(
                f"{self.name}: slot {first} is booked for {_name(max(int(self.owner[first]), FREE))} "
                f"but held by {_name(int(claimed[first]))}; {num_wrong} slots differ in all"
            )

    def _claim(self, holders: Sequence[Holder]) -> None:
        """Enter the holders' slots for the audit. Raise LedgerError if one of them has another holder too."""
        ids = np.concatenate([holder.ids for holder in holders])
        owners = np.repeat([holder.owner for holder in holders], [len(holder.ids) for holder in holders])
        marks = np.arange(len(ids))
        twice = (self._claimed[ids] != NO_OWNER) | (self.owner[ids] == QUARANTINE)
        self._claimed[ids] = marks
        twice |= self._claimed[ids] != marks
        if twice.any():
            owner = int(owners[twice][0])
            raise LedgerError(f"{self.name}: {_few(ids[owners == owner])} of {_name(owner)} have another holder too")
        self._claimed[ids] = owners

    def _rightful(self, ids: Ids, owner: int) -> Ids:
        inside = (ids > PAD) & (ids <= self.capacity)
        wrong = ids[~inside]
        if len(wrong):
            self._violation(f"slot {_few(wrong)} freed by {_name(owner)} is outside 1..{self.capacity}")
        ids = ids[inside]
        mine: npt.NDArray[np.bool_] = self.owner[ids] == owner
        for slot in ids[~mine].tolist():
            holder = int(self.owner[slot])
            kind = "double free" if holder <= FREE else "free of a foreign slot"
            self._violation(f"{kind} of slot {slot} by {_name(owner)}; the ledger books it for {_name(holder)}")
        rightful: Ids = ids[mine]
        return rightful

    def _without_repeats(self, ids: Ids, owner: int) -> Ids:
        unique, first = np.unique(ids, return_index=True)
        self._violation(f"double free: {_name(owner)} passed {len(ids) - len(unique)} slots twice in one call")
        kept = ids[np.sort(first)]
        self.owner[kept] = self._marks[: len(kept)]
        return kept

    def _violation(self, what: str) -> None:
        self.num_violations += 1
        if self.ledger is Ledger.RAISE:
            raise LedgerError(f"{self.name}: {what}")
        _log.error(log.event("ledger_violation", pool=self.name, what=what))


def all_equal(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    """Compare arrays of one length, without allocating a third."""
    return all((first[part] == second[part]).all() for part in _ranges(len(first)))


def _ranges(length: int) -> Iterator[slice]:
    return (slice(first, min(first + _AUDITED, length)) for first in range(0, length, _AUDITED))


def _batches(holders: Iterable[Holder]) -> Iterator[list[Holder]]:
    """Return the holders in batches of at most `_AUDITED` slots, those of more slots in parts."""
    batch, room = list[Holder](), _AUDITED
    for holder in holders:
        for part in _ranges(len(holder.ids)):
            ids = holder.ids[part]
            if len(ids) > room:
                yield batch
                batch, room = [], _AUDITED
            batch.append(Holder(holder.owner, ids))
            room -= len(ids)
    if batch:
        yield batch


def as_ids(values: Sequence[int]) -> Ids:
    """Return the values as an int64 array [N]."""
    return np.array(values, dtype=np.int64)


def _all_are(values: Ids, value: int) -> bool:
    """Whether every entry is `value`. Comparing bytes takes a quarter of the time of comparing and counting."""
    return values.tobytes() == value.to_bytes(8, sys.byteorder, signed=True) * len(values)


def _name(owner: int) -> str:
    if owner <= FREE:
        return "the free list"
    others = {NO_OWNER: "nobody", CACHE: "the prefix cache", GROUP: "a group", QUARANTINE: "quarantine"}
    others[LOADING] = "a load from another tier"
    return others.get(owner, f"request {owner}")


def _few(ids: Ids) -> str:
    shown = ", ".join(map(str, ids[:8].tolist()))
    return f"[{shown}{', ...' if len(ids) > 8 else ''}]"

"""What the memories of the hash model's device have in common."""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.base.parts import I64, Mask
from forebay.memory.slots import FREE, PAD, Slots
from tests.simulation.hashing import U64

POISON: Final = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


class RunnerError(Exception):
    """A plan asked for something no correct plan asks for."""


class SlotBytes:
    """`per_slot` words for each slot of a pool, which is read to check who owns what, never to compute."""

    def __init__(self, slots: Slots, per_slot: int = 1) -> None:
        self.slots = slots
        self.words: U64 = np.full(slots.num_rows * per_slot, POISON, dtype=np.uint64)
        self.by_slot: U64 = self.words.reshape(-1, per_slot)
        self._seen = slots.generation.copy()

    def poison_free(self, wanted: I64) -> None:
        """Poison what is free, was handed out since the last call, or is padding; but for the slots `wanted`, which a
        planned step still copies to the host."""
        generation = self.slots.generation
        gone = (self.slots.owner <= FREE) | (generation != self._seen)
        gone[wanted] = False
        gone[PAD] = True
        self.by_slot[gone] = POISON
        self._seen = generation.copy()

    def poison_padding(self) -> None:
        self.by_slot[PAD] = POISON


class Touched:
    """Slots that a launched step writes, each for a request that must go on holding it, and slots that it reads, of
    these `generations` if they were taken some time ago."""

    def __init__(
        self, slots: Slots, what: str, written: I64, writers: I64, read: I64, generations: I64 | None = None
    ) -> None:
        self.slots, self.what = slots, what
        self.written, self.writers = written, writers
        self.read = read
        self.generations: I64 = slots.generation[read] if generations is None else generations

    def check(self, step: int) -> None:
        """Raise unless all of it is still held by whom it was held by at the launch, or by the cache if it is only
        read."""
        owner, generation = self.slots.owner, self.slots.generation
        if not same(owner[self.written], self.writers):
            raise RunnerError(f"{self.what} {self.written} were released while step {step} writes them")
        if some(owner[self.read] <= FREE) or not same(generation[self.read], self.generations):
            raise RunnerError(f"{self.what} {self.read} were released while step {step} reads them")


def same(a: I64, b: I64) -> bool:
    """Whether two arrays hold the same. Comparing bytes takes a fifth of the time of comparing and reducing."""
    return a.tobytes() == b.tobytes()


def some(mask: Mask) -> bool:
    """Whether anything is set. Counting takes a tenth of the time of `any`."""
    return bool(np.count_nonzero(mask) > 0)


def check_ids(slots: Slots, what: str, ids: I64) -> None:
    """Ids from a plan: in the pool, and not the padding."""
    if len(ids) and (ids.min() <= PAD or ids.max() > slots.capacity):
        raise RunnerError(f"{what} outside 1..{slots.capacity}: {ids}")


def check_unique(what: str, ids: I64) -> None:
    if len(set(ids.tolist())) != len(ids):
        raise RunnerError(f"{what} twice in a step: {ids}")

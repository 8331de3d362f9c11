"""The last places of pairs of tokens, and of tokens: a hash table of fixed size without buckets."""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.memory.slots import Ids

# Odd factors: each permutes the slots, so that tokens with different low bits have different slots.
BEFORE: Final = 0x9E3779B1
TOKEN: Final = 0x85EBCA77
SINGLE: Final = 0xC2B2AE3D


class LastPlaces:
    """The last place of each pair of tokens, and of each token: one slot per hash value, which keeps the newest place.

    Keys are not stored. A look-up therefore may return the place of another key, and 0 for a key whose slot was taken
    over: the caller compares tokens. In return an entry costs one number, many are added in one array operation, and
    nothing is ever removed. Places are positive; `dtype` is int32 or int64.
    """

    def __init__(self, num_slots: int, dtype: type[np.signedinteger[Any]]) -> None:
        self.num_slots = 1 << max(1, (num_slots - 1).bit_length())
        self._mask = self.num_slots - 1
        self._places: npt.NDArray[Any] = np.zeros(self.num_slots, dtype=dtype)  # memory is used as it is written
        self._slots = self._places.data  # reads and writes single numbers in a third of the array's time

    def of_pair(self, before: int, token: int, salt: int = 0) -> int:
        """Return the last position stored for the pair of tokens, possibly of another pair (no collision check)."""
        place: int = self._slots[(before * BEFORE ^ token * TOKEN ^ salt) & self._mask]
        return place

    def of_single(self, token: int) -> int:
        """Return the last position stored for the token, possibly of another token (no collision check)."""
        place: int = self._slots[(token + 1) * SINGLE & self._mask]
        return place

    def add_and_find(self, before: int, token: int, following: int, place: int) -> tuple[int, int]:
        """Enter one token as `add` does, with the place behind it; return what `of_pair` and `of_single` then find for
        the token that follows it."""
        slots, mask = self._slots, self._mask
        slots[(before * BEFORE ^ token * TOKEN) & mask] = place
        slots[(token + 1) * SINGLE & mask] = place
        return slots[(token * BEFORE ^ following * TOKEN) & mask], slots[(following + 1) * SINGLE & mask]

    def add(self, tokens: array[int], first: int, end: int) -> None:
        """Enter each of these tokens, and the pair that it ends, with the place behind it, one by one."""
        slots, mask = self._slots, self._mask
        before = tokens[first - 1] if first else -1
        for place, token in enumerate(tokens[first:end], first + 1):
            if place > 1:
                slots[(before * BEFORE ^ token * TOKEN) & mask] = place
            slots[(token + 1) * SINGLE & mask] = place
            before = token

    def add_many(self, tokens: array[int], first: int, end: int) -> None:
        """Do the same in array operations: the same slots are left with the same places."""
        ids = _as_ids(tokens[first:end])
        slots = np.empty((end - first, 2), dtype=np.int64)
        slots[:, 0] = slots[:, 1] = (ids + 1) * SINGLE & self._mask
        slots[max(0, 1 - first) :, 0] = self._pair_slots(tokens[max(0, first - 1) : end])
        self._places[slots.ravel()] = np.repeat(np.arange(first + 1, end + 1), 2)

    def add_pairs(self, tokens: array[int], first_place: int, salt: int) -> None:
        """Enter each pair of these tokens; the first pair has `first_place`."""
        slots = self._pair_slots(tokens, salt)
        self._places[slots] = np.arange(first_place, first_place + len(slots))

    def _pair_slots(self, tokens: array[int], salt: int = 0) -> Ids:
        ids = _as_ids(tokens)
        slots: Ids = (ids[:-1] * BEFORE ^ ids[1:] * TOKEN ^ salt) & self._mask
        return slots


def _as_ids(tokens: array[int]) -> Ids:
    return np.frombuffer(tokens, dtype=np.int32).astype(np.int64)

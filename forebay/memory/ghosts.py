"""Ghosts: the keys of pages that a prefix cache with more memory would still have, without their KV.

They estimate the part of prompt tokens that a larger cache would reuse. A cache that evicts by last use has the pages
that were used last, whatever its size (Mattson et al. 1970, "Evaluation techniques for storage hierarchies"): a page is
found if fewer other pages than the cache has room for were used since. So one list serves every size. A request uses
its pages at once, and of these the last one is evicted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.memory.slots import Ids

FACTORS: Final = (1, 2, 4)  # sizes that are estimated, in sizes of the tier
MAX_GHOSTS: Final = 1 << 16  # 1.5 MiB; beyond that one page of several has a ghost. Dropping old ones takes 10 ms
_SLACK: Final = 1.2  # ghosts of pages that no size has any more are dropped together
_PLACES: Final = 1.5  # of the table, for each ghost that is wanted: 24 bytes
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_EMPTY: Final = np.uint64(0)
_BASE: Final = np.array([0xD6E8FEB86659FD93], dtype=np.uint64)  # of the hash of a prefix: any large odd number

Keys = npt.NDArray[np.uint64]


class Reuse(NamedTuple):
    """Prompt tokens of the requests of one tenant, those that were reused, and by tier those that would be with each of
    `FACTORS` times its memory."""

    prompt_tokens: int
    reused_tokens: int
    by_tier: Mapping[str, Sequence[int]]


@dataclass(slots=True)
class _Counts:
    """The counts of one tenant, in tokens."""

    prompt: int = 0
    reused: int = 0
    by_tier: dict[str, Counter[int]] = field(default_factory=dict)  # by factor


class _Table:
    """A hash table from the key of a page to the request that used it last and its place among that request's pages: 16
    bytes for each of its `size` places, of which some must be free."""

    def __init__(self, size: int) -> None:
        self.keys: Keys = np.zeros(size, dtype=np.uint64)
        self.request: npt.NDArray[np.uint32] = np.zeros(size, dtype=np.uint32)
        self.place: npt.NDArray[np.uint32] = np.zeros(size, dtype=np.uint32)

    def clear(self) -> None:
        """Free all places; takes no memory."""
        self.keys[:] = _EMPTY

    def find(self, keys: Keys, *, insert: bool = False) -> Ids:
        """Return the place of each key, -1 for a missing one; with `insert` that gets a place. Keys are distinct."""
        size = np.uint64(len(self.keys))
        at = (keys * _SPREAD >> np.uint64(20)) % size
        found = np.full(len(keys), -1, dtype=np.int64)
        left = np.arange(len(keys))
        while len(left):
            there = self.keys[at[left]]
            if insert:
                free = left[there == _EMPTY]
                self.keys[at[free]] = keys[free]  # of two that want one place the second has it
                there = self.keys[at[left]]
            done = there == keys[left]
            found[left[done]] = at[left[done]]
            left = left[~done & (there != _EMPTY)]
            at[left] = (at[left] + np.uint64(1)) % size
        return found


class Ghosts:
    """Estimates for the `tiers` of a prefix cache, whose sizes are in pages of `page_size` tokens.

    Each tier has what the device has, so with several the largest one decides. The estimate leaves out the shares of
    tenants, windows and states.
    """

    def __init__(self, page_size: int, tiers: Mapping[str, int], most: int = MAX_GHOSTS) -> None:
        self._page_size, self.tiers = page_size, dict(tiers)
        self._sampled = -(-max(FACTORS) * max(tiers.values()) // most)  # one page of so many has a ghost
        self._most = max(FACTORS) * max(tiers.values()) // self._sampled + 1
        self._powers: Keys = np.ones(1, dtype=np.uint64)
        self._counts: dict[str, _Counts] = {}
        self._table = _Table(int(self._most * _PLACES) + 16)
        self.clear()

    def clear(self) -> None:
        """Forget all ghosts, when the cache is flushed; takes no memory."""
        self._table.clear()
        self._first: Ids = np.zeros(0, dtype=np.int64)  # by request: the pages that later ones have used since
        self._size: Ids = np.zeros(0, dtype=np.int64)  # by request: the number of its pages
        self._most_requests = 1024  # until those without pages are dropped

    def record(
        self, tokens: Sequence[int], num_prompt: int, *, namespace: str, tenant: str, reused: int, used_pages: int
    ) -> None:
        """Record a request that ends: the number of its prompt tokens that were `reused`, and the pages that it has
        used, all whole ones of `tokens`. Running requests have `used_pages` pages, which are no cache's."""
        keys, numbers = self._keys(tokens, namespace)
        counts = self._counts.setdefault(tenant, _Counts())
        counts.prompt, counts.reused = counts.prompt + num_prompt, counts.reused + reused
        at, most = self._table.find(keys), (num_prompt - 1) // self._page_size  # the last token is always computed
        numbers = numbers[numbers < most]
        # By the number of the prompt's ghosts that are found: the pages that are. If not every page has a ghost, the
        # pages found end halfway between two that have.
        pages_found = (np.append(0, numbers + 1) + np.append(numbers, most)) // 2
        distances = self._distances(at[: len(numbers)]) * self._sampled
        for name in self.tiers:
            own = counts.by_tier.setdefault(name, Counter())
            for factor in FACTORS:
                num_found = np.searchsorted(distances, self._num_pages(name, factor) - used_pages)
                own[factor] += int(pages_found[num_found]) * self._page_size
        self._use(keys, at)

    def _num_pages(self, name: str, factor: int) -> int:
        """Return the pages of the largest tier if one has `factor` times its memory."""
        others = [size for other, size in self.tiers.items() if other != name]
        return max([factor * self.tiers[name], *others])

    def estimates(self) -> dict[str, Reuse]:
        """Return the counts of each tenant since the start."""
        return {
            tenant: Reuse(
                counts.prompt,
                counts.reused,
                {name: [of[factor] for factor in FACTORS] for name, of in counts.by_tier.items()},
            )
            for tenant, counts in self._counts.items()
        }

    # -- inside -------------------------------------------------------------------------------------------------------

    def _keys(self, tokens: Sequence[int], namespace: str) -> tuple[Keys, Ids]:
        """Return the keys of those whole pages that have ghosts, and the numbers of these pages. A key is a hash of the
        namespace and of all tokens up to the end of the page."""
        num_pages = len(tokens) // self._page_size
        num_tokens = num_pages * self._page_size
        while len(self._powers) <= num_tokens:
            self._powers = np.concatenate([self._powers, self._powers * self._powers[-1:] * _BASE])
        ids = np.asarray(tokens[:num_tokens], dtype=np.int64).astype(np.uint64) + np.uint64(1)
        salt = int.from_bytes(blake2b(namespace.encode(), digest_size=8).digest())
        sums = np.cumsum(ids * self._powers[1 : num_tokens + 1])[self._page_size - 1 :: self._page_size]
        keys = _mixed(sums ^ np.uint64(salt))
        keys[keys == _EMPTY] = 1
        numbers = np.flatnonzero(keys % np.uint64(self._sampled) == 0)
        return keys[numbers], numbers

    def _distances(self, at: Ids) -> Ids:
        """Return the number of other pages that were used since each of a prompt's pages was, up to the first page that
        has no ghost."""
        missing = np.flatnonzero(at < 0)
        at = at[: missing[0]] if len(missing) else at
        if not len(at):
            return np.zeros(0, dtype=np.int64)
        alive = self._size - self._first
        behind = np.cumsum(alive[::-1])[::-1] - alive  # pages of later requests
        request = self._table.request[at]
        distances: Ids = behind[request] + self._table.place[at].astype(np.int64) - self._first[request]
        return distances

    def _use(self, keys: Keys, at: Ids) -> None:
        """Record that a request has used the pages with these keys, which are at `at` in the table, -1 for new ones."""
        if not len(keys):
            return
        known = at[at >= 0]
        np.maximum.at(self._first, self._table.request[known], self._table.place[known].astype(np.int64) + 1)
        self._first = np.append(self._first, 0)
        self._size = np.append(self._size, len(keys))
        if int((self._size - self._first).sum()) > self._most * _SLACK or len(self._size) > self._most_requests:
            self._drop_old()
        at = self._table.find(keys, insert=True)
        self._table.request[at] = len(self._size) - 1
        self._table.place[at] = np.arange(len(keys))

    def _drop_old(self) -> None:
        """Drop the ghosts of pages that no size has any more, and number the requests anew."""
        old, alive = self._table, self._size - self._first
        behind = np.cumsum(alive[::-1])[::-1] - alive
        taken = np.flatnonzero(old.keys)
        request, place = old.request[taken], old.place[taken]
        current = place >= self._first[request]
        kept = current & (behind[request] + place - self._first[request] < self._most)
        size = self._first + np.bincount(request[kept], minlength=len(self._size))
        size[-1] = self._size[-1]  # of the request that is being recorded
        used = size > self._first
        number = np.cumsum(used) - 1
        self._first, self._size = self._first[used], size[used]
        self._most_requests = 1024 + 2 * len(self._size)
        self._table = _Table(int(self._most * _PLACES) + 16)
        at = self._table.find(old.keys[taken[kept]], insert=True)
        self._table.request[at], self._table.place[at] = number[request[kept]], place[kept]


def _mixed(values: Keys) -> Keys:
    """Return a mix of the bits of each value (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = values ^ (values >> np.uint64(31))
    return mixed

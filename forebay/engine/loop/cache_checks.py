"""Self-checks of the prefix cache: an idle engine computes entries again, and compares them to the bit (C19, C30)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ForebayError
from forebay.base.log import event, get_logger
from forebay.base.units import ceil_div
from forebay.memory.adapters import AdapterLoad
from forebay.memory.kv_allocator import KV
from forebay.memory.radix_node import OPERATOR, TOKEN_BYTES, Node, Root
from forebay.memory.slots import Ids
from forebay.memory.tier import Prefix, Tier
from forebay.requests.account import Account
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import Update
from forebay.scheduler.checked_prefixes import CHECK, clear_checks
from forebay.scheduler.counters import OF_REQUESTS
from forebay.scheduler.journal import Beyond, CheckEnded, ChecksCleared
from forebay.scheduler.memory.tier_copies import namespace_in
from forebay.scheduler.scheduler import NO_LIMIT, Scheduler

CHECK_ID: Final = 1 << 62  # of the request: no client's has it
_EVICTS: Final = 16  # a check evicts no more than one in so many pages of the device
_STEP_S: Final = 0.02  # of a step: a request that arrives meanwhile waits no longer
_FEWEST_TOKENS: Final = 16  # of a step
_SLICE_BYTES: Final = 16 << 20  # compared at once, which takes about 10 ms
_TRIES: Final = 8  # entries that are looked at for one that can be checked

log = get_logger("cache-checks")

Differing = Mapping[str, npt.NDArray[np.bool_]]
"""By kind of cache whether each row differs."""


class Compare(Protocol):
    """Compares rows of a tier with rows of the device."""

    def __call__(self, tier: str, there: Mapping[str, Ids], here: Mapping[str, Ids]) -> Differing | None:
        """Return which rows differ; None if those of the tier cannot be read. No step may be in flight."""


Forget = Callable[[Prefix, int], None]
"""Drops the last page of a prefix, which has that number, and what is behind it from all that outlasts the process."""


class Entry(NamedTuple):
    """A cached prefix to check in one tier. `like` is a request that would find it, in any tier."""

    tier: Tier
    prefix: Prefix
    like: Request


class Part(NamedTuple):
    """Rows of one kind to compare, each of the page with that number."""

    kind: str
    there: Ids
    here: Ids
    pages: Ids


@dataclass(slots=True)
class Comparison:
    """The comparison of an entry: rows to compare, and the first page that differs so far."""

    entry: Entry
    parts: Iterator[Part]
    num_tokens: int
    first: int | None = None


class Checks(Protocol):
    """Interface of the checks for the engine's loop."""

    @property
    def computing(self) -> bool:
        """Whether the scheduler has a request of a check."""

    def wait_s(self, now: float, least_s: float) -> float | None:
        """Return the seconds until there is something to do, at least `least_s` between two checks; None for never."""

    def turn(self, now: float) -> None:
        """Begin a check if one is due, or compare a slice. The engine is idle; computing is done by its steps."""

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of a step of a check."""

    def take(self, updates: list[Update]) -> list[Update]:
        """Return the updates of clients' requests. Once the request of the check has ended, and no step is in flight,
        its entry is compared."""

    def stop(self) -> None:
        """End the check, if there is one, without a result."""


class NoChecks(Checks):
    """The checks of an engine that checks nothing."""

    computing = False

    def wait_s(self, now: float, least_s: float) -> None:
        """Return None: nothing is ever due."""

    def turn(self, now: float) -> None:
        """Begin nothing."""

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Ignore the duration: no step is of a check."""

    def take(self, updates: list[Update]) -> list[Update]:
        """Return all updates: none is of a check."""
        return updates

    def stop(self) -> None:
        """End nothing."""


class CacheChecks(Checks):
    """Checks `per_minute` entries of the prefix cache while nothing else is to do, of all tiers alike.

    An entry's tokens are computed again as an ordinary request, in a namespace of its own and without the cache. Then
    its pages, windows and states are compared, slice by slice. What differs is dropped from all tiers, with all that is
    cached behind it, in files as well by `forget`. `stop` ends a check, before anything else begins.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compare: Compare,
        *,
        forget: Forget = lambda prefix, first: None,
        per_minute: float,
        now: float,
        rng: Random | None = None,
    ) -> None:
        self._scheduler, self._compare, self._forget = scheduler, compare, forget
        self._interval_s = 60.0 / per_minute
        self._due_at = now + self._interval_s
        self._rng = rng or Random()
        self._entry: Entry | None = None  # while it is computed
        self._comparison: Comparison | None = None
        self._counted: dict[str, float] = {}  # of requests, before the check
        self._s_per_token: float | None = None
        self._counters = scheduler.memory.tiers.counters
        self._now = now

    @property
    def computing(self) -> bool:
        return self._entry is not None

    @property
    def busy(self) -> bool:
        """Whether a check goes on."""
        return self._entry is not None or self._comparison is not None

    def wait_s(self, now: float, least_s: float) -> float:
        """Return the seconds until the next slice or check, at least `least_s` between two checks."""
        return 0.0 if self.busy else max(least_s, self._due_at - now)

    # -- what is checked ----------------------------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """Begin a check if one is due, or compare a slice. The engine is idle."""
        self._now = now
        if self._comparison is not None:
            self._compare_slice(self._comparison)
        elif now >= self._due_at and self._entry is None:
            self._due_at = now + self._interval_s
            if self._clear() and (entry := self._choose()) is not None:
                self._begin(entry, now)

    def _choose(self) -> Entry | None:
        """Return a random entry that can be checked, None if none is found soon."""
        memory = self._scheduler.memory
        nodes = [(tier, node) for tier in (memory.tiers.device, *memory.tiers.all) for node in tier.cache.index.nodes()]
        nodes = [(tier, node) for tier, node in nodes if node.parent is not None]
        for tier, node in self._rng.sample(nodes, min(_TRIES, len(nodes))):
            if (entry := self._entry_of(tier, node)) is not None:
                return entry
        return None

    def _entry_of(self, tier: Tier, node: Node) -> Entry | None:
        """Return the prefix that ends with a node; None if it cannot be computed now."""
        key, step, scheduler = b"", node, self._scheduler
        while step.parent is not None:
            key, step = step.key + key, step.parent
        assert isinstance(step, Root), "a node has no root"
        tokens = np.frombuffer(key, dtype=np.int32)
        num_pages = ceil_div(len(tokens) + 1, scheduler.config.page_size)
        most_pages = max(scheduler.pools.kv.num_free, scheduler.pools.kv.capacity // _EVICTS)
        if num_pages > most_pages or len(tokens) >= scheduler.config.context_length:
            return None
        pictures = scheduler.pools.pictures
        if pictures is not None and pictures.stand_for(tokens).any():
            return None
        like = self._like(tier, step.namespace, tokens)
        return None if like is None else Entry(tier, Prefix(key, step.namespace, OPERATOR, ""), like)

    def _like(self, tier: Tier, namespace: str, tokens: npt.NDArray[np.int32]) -> Request | None:
        """Return a request that finds a prefix of a tier; None if no request does any more."""
        version, adapters = self._scheduler.queues.weight_version, self._scheduler.pools.adapters.accepting
        for adapter in (None, *adapters):
            _, _, own = namespace.partition("/")
            like = self._request(tokens, own, adapter)
            like.compute_with(version)
            if namespace_in(like, tier) == namespace:
                return like
        return None

    def _request(self, tokens: npt.NDArray[np.int32], namespace: str, adapter: AdapterLoad | None) -> Request:
        return Request(
            CHECK_ID,
            tokens.tolist(),
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            namespace=namespace,
            tenant=CHECK,
            adapter=adapter,
            resume_points=(len(tokens),),
            is_check=True,
        )

    # -- computing ----------------------------------------------------------------------------------------------------

    def _begin(self, entry: Entry, now: float) -> None:
        """Compute the tokens of an entry again. The request has a tenant of its own and changes no count of requests:
        no client and no metric sees it. Failures of steps are counted."""
        scheduler = self._scheduler
        scheduler.queues.accounts[CHECK] = Account(CHECK)
        self._entry, self._counted = entry, {each.name: scheduler.counters[each.name] for each in OF_REQUESTS}
        tokens = np.frombuffer(entry.prefix.key, dtype=np.int32)
        scheduler.chunk_limit = self._most_tokens()
        try:
            scheduler.add(self._request(tokens, CHECK, entry.like.adapter), now)
        except ForebayError as error:
            log.warning(event("cache_check_refused", tokens=len(tokens), reason=error.message))
            self._end()

    def _most_tokens(self) -> int:
        if self._s_per_token is None:
            return _FEWEST_TOKENS
        return max(_FEWEST_TOKENS, int(_STEP_S / max(self._s_per_token, 1e-9)))

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of a step of a check, from which the tokens of the next ones follow."""
        if num_tokens:
            self._s_per_token = seconds / num_tokens
        self._scheduler.chunk_limit = self._most_tokens()

    def take(self, updates: list[Update]) -> list[Update]:
        """Return the updates of clients' requests. If the request of the check has ended, compare its entry next."""
        if self._entry is None:
            return updates
        others = [update for update in updates if update.request_id != CHECK_ID]
        if self._scheduler.idle:
            entry = self._end()
            parts = [*self._parts(entry)]
            num_pages = sum(len(part.pages) for part in parts if part.kind == KV)
            self._comparison = Comparison(entry, iter(parts), num_pages * self._scheduler.config.page_size)
        return others

    def _end(self) -> Entry:
        assert self._entry is not None, "no check is computed"
        entry, self._entry = self._entry, None
        self._scheduler.chunk_limit = NO_LIMIT
        self._scheduler.counters.update(self._counted)
        if self._scheduler.queues.journal is not None:
            self._scheduler.queues.journal(CheckEnded())
        del self._scheduler.queues.accounts[CHECK]
        return entry

    def stop(self) -> None:
        """End the check, if there is one, without a result."""
        if not self.busy:
            return
        if self._entry is not None:
            self._scheduler.abort(CHECK_ID)
            self._end()
            self._scheduler.outputs.updates = [
                update for update in self._scheduler.outputs.updates if update.request_id != CHECK_ID
            ]
        self._comparison = None
        self._clear()

    def _clear(self) -> bool:
        """Drop what was computed again; return whether all of it is gone: steps in flight may use some."""
        if self._scheduler.queues.journal is not None:
            self._scheduler.queues.journal(ChecksCleared())
        return clear_checks(self._scheduler.pools.cache)

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _parts(self, entry: Entry) -> Iterator[Part]:
        """Yield the rows that the entry's tier and the device have, in slices."""
        tier, device = entry.tier, self._scheduler.memory.tiers.device
        mine = self._request(np.frombuffer(entry.prefix.key, dtype=np.int32), CHECK, entry.like.adapter)
        mine.compute_with(self._scheduler.queues.weight_version)
        nodes_there, there = tier.walk(entry.prefix)
        nodes_here, here = device.walk(entry.prefix._replace(namespace=mine.cache_namespace))
        num_pages = min(len(there), len(here))
        yield from self._sliced(Part(KV, there[:num_pages], here[:num_pages], np.arange(num_pages)))
        for name, part in tier.parts.items():
            ends, slots = part.kept(nodes_there, there)
            own_ends, own_slots = device.parts[name].kept(nodes_here, here)
            _, at, own_at = np.intersect1d(ends, own_ends, return_indices=True)
            yield from self._sliced(Part(name, slots[at], own_slots[own_at], ends[at] - 1))

    def _sliced(self, part: Part) -> Iterator[Part]:
        count = max(1, _SLICE_BYTES // max(1, self._scheduler.config.kinds.slot_bytes.get(part.kind, 0)))
        for begin in range(0, len(part.pages), count):
            cut = slice(begin, begin + count)
            yield Part(part.kind, part.there[cut], part.here[cut], part.pages[cut])

    def _compare_slice(self, comparison: Comparison) -> None:
        """Compare the next slice, or end the check after the last one."""
        part = next(comparison.parts, None)
        if part is None:
            return self._conclude(comparison)
        tier = comparison.entry.tier
        differing = self._compare(tier.name, {part.kind: part.there}, {part.kind: part.here})
        if differing is None:  # read and refused by the tier itself: a loss, and no divergence
            self._note_drop()
            tier.cache.discard(comparison.entry.prefix.key, int(part.pages[0]), comparison.entry.prefix.namespace)
            return self.stop()
        pages = part.pages[differing[part.kind]]
        if len(pages):
            first = int(pages.min())
            comparison.first = first if comparison.first is None else min(comparison.first, first)
        return None

    def _conclude(self, comparison: Comparison) -> None:
        if comparison.num_tokens:
            self._counters["cache_checks"] += 1
            self._counters["cache_checked_tokens"] += comparison.num_tokens
        if comparison.first is not None:
            self._drop(comparison.entry, comparison.first)
        self._comparison = None
        self._clear()

    def _note_drop(self) -> None:
        if self._scheduler.queues.journal is not None:
            self._scheduler.queues.journal(Beyond("an entry of the prefix cache differed, and was dropped"))

    def _drop(self, entry: Entry, first: int) -> None:
        """Drop an entry from page number `first` on, with all that is cached behind it, and log its history."""
        self._note_drop()
        tiers, page_size = self._scheduler.memory.tiers, self._scheduler.config.page_size
        key, histories, mover = entry.prefix.key, [], ""
        for tier in (tiers.device, *tiers.all):
            namespace = namespace_in(entry.like, tier)
            if namespace is None:
                continue
            there = entry.prefix._replace(namespace=namespace)
            if tier.durable:  # what its tree has evicted may still be in a file
                self._forget(there._replace(key=key[: (first + 1) * page_size * TOKEN_BYTES]), first)
            nodes, pages = tier.walk(there)
            if len(pages) <= first:
                continue
            stops = np.cumsum([len(node.pages) for node in nodes])
            origin = nodes[int(np.searchsorted(stops, first, side="right"))].origin
            histories.append(f"{tier.name}: {origin.mover} {max(0.0, self._now - origin.at):.0f} s ago")
            if tier is entry.tier:
                mover = origin.mover
            tier.cache.discard(key, first, namespace)
        self._counters[f"cache_divergence.{mover}"] += 1
        log.error(
            event(
                "cache_divergence",
                tier=entry.tier.name,
                position=first * page_size,
                tokens=len(key) // TOKEN_BYTES,
                history="; ".join(histories),
                effect="dropped with what was cached behind it",
            )
        )

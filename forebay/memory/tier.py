"""A tier of the prefix cache: a tree over the slots of one memory, and the copies between two of them (C18, C19).

The device's cache is the first tier, host memory and files are others. All have trees of the same class, so that keys,
fair shares, the order of eviction and the lengths at which a request can resume are the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np

from forebay.config.engine_config import SchedulerConfig
from forebay.memory.kinds.kind import Kept, Kind, Kinds, TieredKind
from forebay.memory.kv_allocator import KV
from forebay.memory.radix_cache import RadixCache
from forebay.memory.radix_node import COMPUTED, Node, Pin
from forebay.memory.slots import LOADING, NO_IDS, Ids, Slots

DEVICE: Final = "device"
HOST: Final = "host"
DISK: Final = "disk"  # outlasts the process


class TierKind(Kind):
    """A kind of cache in a tier behind the device: no request holds slots of it."""

    def __init__(self, part: TieredKind) -> None:
        self._part, self.slots = part, part.in_tree.slots

    @property
    def parts(self) -> tuple[object, ...]:
        return self._part.in_tree, self._part, self._part.retained

    def clear(self) -> None:
        self._part.in_tree.clear()


class Prefix(NamedTuple):
    """The first pages of a prompt: `key` has their tokens, and the tenant is charged for those that are cached."""

    key: bytes
    namespace: str
    author: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The slots of one tier for the pages of `prefix` from number `start` on: `pages` of KV, and of other kinds those
    in `kept`, whose `ends` may be in front of `start`."""

    prefix: Prefix
    start: int
    pages: Ids
    kept: Mapping[str, Kept]

    @property
    def slots(self) -> dict[str, Ids]:
        """Return the slots by kind of cache."""
        return {KV: self.pages, **{name: kept.slots for name, kept in self.kept.items()}}

    @property
    def stop(self) -> int:
        """The number of the page behind the last one."""
        return self.start + len(self.pages)

    def head(self, num_pages: int, page_bytes: int) -> Span:
        """Return the part of the span up to its first `num_pages` pages."""
        stop = self.start + num_pages
        kept = {name: Kept(ends[ends <= stop], ids[ends <= stop]) for name, (ends, ids) in self.kept.items()}
        prefix = self.prefix._replace(key=self.prefix.key[: stop * page_bytes])
        return Span(prefix=prefix, start=self.start, pages=self.pages[:num_pages], kept=kept)


class Tier:
    """The prefix tree of one memory: `cache` over the pages `kv`, and the `parts` of other kinds by name. Nothing is
    stored in a tier that no longer `stores`: one that was found not to be `writable`, which may change at any time."""

    def __init__(self, name: str, kv: Slots, cache: RadixCache, parts: Mapping[str, TieredKind]) -> None:
        self.name, self.kv, self.cache, self.parts = name, kv, cache, parts
        self.durable = name == DISK
        self.writable: Callable[[], bool] = lambda: True
        self.stores = True

    @classmethod
    def behind(cls, name: str, device: Kinds, config: SchedulerConfig) -> Self:
        """Make a tier behind the device's, whose kinds are `device`, with the slots that `config.tiers` gives it."""
        num_slots = config.tiers[name]
        kv = Slots(f"{name} {KV}", num_slots[KV], ledger=config.ledger)
        parts = [part.of_tier(num_slots.get(part.name, 0), kv.capacity) for part in device.tiered]
        kinds = Kinds(map(TierKind, parts))
        cache = RadixCache(
            kv,
            config.page_size,
            policy=config.radix_eviction_policy,
            kinds=kinds,
            weights=config.tenants,
            most_retained=config.pinned_cache_fraction,
        )
        return cls(name, kv, cache, {part.name: part for part in kinds.tiered})

    def retained_slots(self) -> set[tuple[str, int]]:
        """Return the slots by kind of cache that a request reads which resumes at the end of a retained prefix."""
        retention = self.cache.retention
        found = {(KV, page) for node in retention.nodes for page in node.pages.tolist()}
        for each in retention:
            nodes = self._path(each.node)
            for name, part in self.parts.items():
                ends, slots = part.kept(nodes, each.pages)
                found.update((name, slot) for slot in slots[ends >= part.first_read(len(each.pages))].tolist())
        return found

    def _path(self, node: Node) -> list[Node]:
        """Return the nodes that lead to a node, the first one below the root."""
        nodes, step = list[Node](), node
        while step.parent is not None:
            nodes.append(step)
            step = step.parent
        return nodes[::-1]

    def walk(self, prefix: Prefix) -> tuple[list[Node], Ids]:
        """Return the nodes and pages of as much of the prefix as is cached, whether or not a request can resume."""
        root = self.cache.index.roots.get(prefix.namespace)
        if root is None:
            return [], NO_IDS
        nodes, chunks, _, _ = self.cache.index.walk(root, prefix.key, 0, len(prefix.key))
        return nodes, np.concatenate([NO_IDS, *chunks])

    def take(self, like: Span) -> Span | None:
        """Take slots for a copy of a span of another tier, and evict for them; None if there are too few."""
        needed = {name: len(kept.slots) for name, kept in like.kept.items()}
        if len(like.pages) > self.kv.num_free + self.cache.num_evictable:
            return None
        self.cache.evict(max(0, len(like.pages) - self.kv.num_free))
        for name, count in needed.items():
            self.parts[name].in_tree.make_room(count)
        if len(like.pages) > self.kv.num_free or any(
            count > self.parts[name].in_tree.slots.num_free for name, count in needed.items()
        ):
            return None
        kept = {
            name: Kept(ends, self.parts[name].in_tree.slots.take_ids(len(ends), LOADING))
            for name, (ends, _) in like.kept.items()
        }
        pages = self.kv.take_ids(len(like.pages), LOADING)
        return Span(prefix=like.prefix, start=like.start, pages=pages, kept=kept)

    def give_back(self, span: Span) -> None:
        """Free the slots of a span that was taken and is not attached."""
        self.kv.return_ids(span.pages, LOADING)
        for name, kept in span.kept.items():
            self.parts[name].in_tree.slots.return_ids(kept.slots, LOADING)

    def attach(self, span: Span, mover: str) -> bool:
        """Give the tree a span that was taken and that `mover` has written; what the tree has already is freed. Return
        False, and free all of it, if the pages in front of it have been evicted meanwhile."""
        pin = self._pin(span.prefix, span.start, mover)
        if pin is None:
            self.give_back(span)
            return False
        paged = {name: kept for name, kept in span.kept.items() if not self.parts[name].at_ends}
        for name, (ends, slots) in paged.items():
            self.parts[name].lend(span.pages[ends - 1 - span.start], slots)
        ended = {name: kept for name, kept in span.kept.items() if self.parts[name].at_ends}
        stops = np.unique(np.concatenate([[span.stop], *(kept.ends for kept in ended.values())])).tolist()
        for stop in stops:
            if stop > pin.num_pages:
                self._extend(pin, span, stop)
        self.cache.unpin(pin)
        for name, kept in ended.items():
            for end, slot in zip(kept.ends.tolist(), kept.slots, strict=True):
                self._attach_at(name, span.prefix, end, slot)
        return True

    def _extend(self, pin: Pin, span: Span, stop: int) -> None:
        page_bytes, own = self.cache.index.page_bytes, span.pages[pin.num_pages - span.start : stop - span.start]
        adoption = self.cache.extend_pin(pin, span.prefix.key[: stop * page_bytes], own, LOADING)
        spare = own[: len(adoption.replaced)]
        for part in self.parts.values():
            part.free_lent(spare, LOADING)
        self.kv.return_ids(spare, LOADING)

    def _attach_at(self, name: str, prefix: Prefix, end: int, slot: int) -> None:
        part, pin = self.parts[name], self._pin(prefix, end)
        if pin is None or not part.attach_at(pin, int(slot), LOADING):
            part.in_tree.slots.return_ids(np.array([slot], dtype=np.int64), LOADING)
        if pin is not None:
            self.cache.unpin(pin)

    def _pin(self, prefix: Prefix, num_pages: int, mover: str = COMPUTED.mover) -> Pin | None:
        return self.cache.pin_pages(prefix.key, num_pages, prefix.namespace, prefix.author, prefix.tenant, mover)

    def clear(self) -> None:
        """Forget all that is cached."""
        self.cache.clear()
        self.kv.clear()


def missing(source: Tier, target: Tier, here: Prefix, there: Prefix, *, whole: bool, known: int = 0) -> Span | None:
    """Return the slots of `source` to copy so that `target` has the prefix, too; None if the source lacks a part of it,
    or the target nothing. The prefix is `here` in the source, and `there` in the target, whose span it is.

    With `whole` all is copied that the source keeps for the prefix, else only what a request reads that resumes at its
    end. The first `known` pages are on their way to the target already.
    """
    stop = len(here.key) // source.cache.index.page_bytes
    nodes, pages = source.walk(here)
    if len(pages) < stop:
        return None
    nodes_there, pages_there = target.walk(there)
    start = has = max(len(pages_there), known)
    kept: dict[str, Kept] = {}
    for name, part in source.parts.items():
        ends, slots = part.kept(nodes, pages)
        lacks = ~np.isin(ends, target.parts[name].kept(nodes_there, pages_there).ends)
        read = ends >= part.first_read(stop)
        lacks &= read | ((ends > has) | part.at_ends if whole else False)
        if known:
            lacks &= ends > known
        kept[name] = Kept(ends[lacks], slots[lacks])
        if not part.at_ends and lacks.any():
            start = min(start, int(ends[lacks][0]) - 1)
    if start == stop and not any(len(each.ends) for each in kept.values()):
        return None
    return Span(prefix=there, start=start, pages=pages[start:], kept=kept)


def of_device(kv: Slots, cache: RadixCache, kinds: Kinds) -> Tier:
    """Return the device's cache as a tier."""
    return Tier(DEVICE, kv, cache, {part.name: part for part in kinds.tiered})


def untiered(kinds: Kinds) -> Sequence[str]:
    """Return the names of kinds that the prefix cache keeps and that no other tier could."""
    tiered = {part.name for part in kinds.tiered}
    return [part.name for part in kinds.attached if part.name not in tiered]

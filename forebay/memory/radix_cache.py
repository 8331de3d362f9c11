"""The radix prefix cache: full KV, and whatever else layers keep beside it (C18, C19, C20).

A tree per namespace; an edge holds whole pages of tokens and the pages that keep their KV. Keys are the exact tokens as
bytes (int32, little endian): comparing is a memcmp, a child is found by its first page's bytes, and no hash ever stands
in for the tokens. Only full pages that completed steps wrote are adopted; the request that computed them goes on using
them under a pin. A hit ends where every kind can be resumed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from operator import attrgetter
from typing import Any, Final

import numpy as np
from sortedcontainers import SortedList

from forebay.config.engine_config import EvictionPolicy
from forebay.memory.kinds.kind import CachedPart, Kinds, ResumedKind, Watcher
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_index import RadixIndex
from forebay.memory.radix_node import (
    COMPUTED,
    NO_NODE,
    OPERATOR,
    Adoption,
    Match,
    Node,
    Origin,
    Pin,
    Root,
    Shares,
    Tenants,
)
from forebay.memory.retention import NotKept, Retained, Retention
from forebay.memory.slots import CACHE, NO_IDS, Holder, Ids, Slots

_MAX_TOMBSTONES: Final = 64  # first pages of evicted children a node remembers, so that a miss can say "evicted"
_LEAVES_PER_SLICE: Final = 64  # of a flush: about 0.5 ms
_MAX_RELEASED: Final = 4096  # the same where all go at once
_MAX_EMPTY_ROOTS: Final = 256  # namespaces come from clients: only so many are remembered for their tombstones alone

_EVICTION_ORDER: Final[dict[EvictionPolicy, Callable[[Node], Any]]] = {
    EvictionPolicy.LRU: attrgetter("last_access"),
    EvictionPolicy.LFU: attrgetter("hits", "last_access"),
    EvictionPolicy.PRIORITY: attrgetter("priority", "last_access"),
}


class Leaves:
    """The unpinned leaves of the tree, by tenant, in the order in which they are evicted.

    Entries are (retained, useful, order, stamp, node): a leaf from which no request can resume, because a kind
    `at_ends` keeps nothing for it, comes first. The others are in the `order` of the policy, equal ones in that of
    their entry, and `retained` ones last.
    """

    def __init__(self, order: Callable[[Node], Any], at_ends: Sequence[ResumedKind], retained: Container[Node]) -> None:
        self._order, self._at_ends, self._retained = order, at_ends, retained
        self._of: dict[str, SortedList] = {}
        self._stamps = 0

    def offer(self, leaf: Node) -> None:
        """Make a leaf a candidate for eviction."""
        useful = all(kind.num_kept(leaf) for kind in self._at_ends)
        self._stamps += 1
        self.withdraw(leaf)
        leaf.rank = (leaf in self._retained, useful, self._order(leaf), self._stamps, leaf)
        self._of.setdefault(leaf.tenant, SortedList()).add(leaf.rank)

    def withdraw(self, node: Node) -> None:
        """Remove a node from the candidates, if it is one."""
        if node.rank is not None:
            self._of[node.tenant].remove(node.rank)
            node.rank = None

    def victims(self, shares: Shares, retention: Retention) -> Iterator[Node]:
        """Yield the next leaf to evict, of the tenant whose turn it is; the caller evicts it before the next one. If
        only retained leaves are left, their retention ends, one prefix after another."""
        while True:
            for tenant, target in shares.turns():
                leaves = self._of.get(tenant)
                while leaves and not leaves[0][0] and shares.held[tenant] > target:
                    yield leaves[0][-1]
            if not retention.give_up(lambda node, _: not node.locks and retention.is_last(node)):
                return

    def oldest(self) -> Iterator[Node]:
        """Yield the next leaf to evict in the policy's order alone, of any tenant; the caller evicts it."""
        heap = [(leaves[0], leaves) for leaves in self._of.values() if leaves]
        heapify(heap)
        while heap:
            rank, leaves = heap[0]
            yield rank[-1]
            if leaves:
                heapreplace(heap, (leaves[0], leaves))
            else:
                heappop(heap)

    def clear(self) -> None:
        """Forget all candidates."""
        self._of.clear()


class RadixCache:
    """Prefixes of finished and running requests, page by page.

    `slots` is the pool of pages: the cache takes pages over from requests (`extend_pin`) and returns them there
    (`evict`). Units are pages except where a name says tokens. `clock` counts the uses that have an order. `weights`
    are those of tenants, 1 for any other; `shares` counts the pages that are charged to each of the `tenants`, and
    `retention` has the prefixes that are evicted last, at most `most_retained` of each pool. `watcher` learns what
    changes, from the calls that change the tree.
    """

    def __init__(
        self,
        slots: Slots,
        page_size: int,
        *,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        kinds: Kinds | None = None,
        weights: Mapping[str, int] | None = None,
        most_retained: float = 0.0,
    ) -> None:
        self.kinds = kinds or Kinds()
        self.index = RadixIndex(page_size, self.kinds)
        self.page_size = page_size
        self.tenants = Tenants(weights or {})
        self.shares = Shares(self.tenants)
        for part in self.kinds.parts:
            if isinstance(part, CachedPart):
                part.tree, part.shares = self, Shares(self.tenants)
        self._slots = slots
        self._at_ends = tuple(kind for kind in self.kinds.resumed if kind.at_ends)
        self.at_ends = bool(self._at_ends)  # whether requests resume only at ends of nodes
        retained: dict[Node, Counter[str]] = {}
        self._leaves = Leaves(_EVICTION_ORDER[policy], self._at_ends, retained)
        self.retention = Retention(
            retained, slots, self.kinds.retained, self._leaves.offer, fraction=most_retained, tenants=weights or {}
        )
        self.watcher: Watcher | None = None
        self.clock = 0
        self._num_to_flush = 0
        self._flushes = False
        self.num_pages = 0
        self.num_evictable = 0
        self.num_evicted_pages = 0

    # -- pinning --------------------------------------------------------------------------------------------------

    def pin(
        self,
        match: Match,
        namespace: str = "",
        priority: int = 0,
        author: str = OPERATOR,
        tenant: str = "",
        at: float = 0.0,
    ) -> Pin:
        """Pin the prefix that `match` found, for `author` of `tenant`, whose request arrived at time `at` in seconds:
        mark its path as used and protect it from eviction. The tree must not have changed since the match."""
        node = match.node
        assert node is NO_NODE or match.version == self.index.version, "the tree has changed since the match"
        if node is NO_NODE:
            node = self._root(namespace)
        elif match.inside < len(node.key):
            node = self._split(node, match.inside)
        self.clock += 1
        step: Node | None = node
        while step is not None:
            step.last_access = self.clock
            step.hits += 1
            if priority > step.priority:
                step.priority = priority
            step = step.parent
        self._lock(node)
        num_pages = match.num_tokens // self.page_size
        for kind in self.kinds.resumed:
            kind.touch(node, num_pages)
        self.tenants.use(tenant, at)
        if self.retention.nodes:
            self.retention.use(node, at)
        return Pin(node, num_pages, author, tenant, Origin(at=at))

    def retain(self, match: Match, tenant: str, ttl_s: float, now: float) -> Retained | NotKept:
        """Evict the prefix that `match` found last, until `ttl_s` seconds after time `now` and after each of its uses;
        return why not if the tenant may retain no more. The tree must not have changed since the match."""
        assert match.version == self.index.version, "the tree has changed since the match"
        node = match.node
        if match.inside < len(node.key):
            node = self._split(node, match.inside)
        return self.retention.retain(match, node, tenant, ttl_s, now)

    def pin_pages(
        self,
        key: bytes,
        num_pages: int,
        namespace: str = "",
        author: str = OPERATOR,
        tenant: str = "",
        mover: str = COMPUTED.mover,
    ) -> Pin | None:
        """Pin the first `num_pages` pages of `key`, whether or not a request can resume behind them; None if some of
        them are not cached. What is adopted behind them was brought by `mover`."""
        root, end = self._root(namespace), num_pages * self.index.page_bytes
        nodes, _, inside, position = self.index.walk(root, key, 0, end)
        if position < end:
            self._forget_if_empty(root)
            return None
        node = nodes[-1] if nodes else root
        if nodes and inside < len(node.key):
            node = self._split(node, inside)
        self._lock(node)
        return Pin(node, num_pages, author, tenant, Origin(mover, self.tenants.now))

    def unpin(self, pin: Pin) -> None:
        """Release a pin; pages without any other pin can be evicted."""
        self._unlock(pin.node)

    def extend_pin(self, pin: Pin, key: bytes, pages: Ids, owner: int) -> Adoption:
        """Adopt `pages` of request `owner`: the KV of `key`, whole pages from the end of `pin` on, all of it written by
        completed steps. The pin moves to the end of them.
        """
        start = pin.num_pages
        end = (start + len(pages)) * self.index.page_bytes
        nodes, chunks, inside, position = self.index.walk(pin.node, key, start * self.index.page_bytes, end)
        if nodes and inside < len(nodes[-1].key):
            nodes[-1] = self._split(nodes[-1], inside)
        node, replaced, remapped = pin.node, NO_IDS, list[Ids]()
        if nodes:
            node, replaced = nodes[-1], np.concatenate(chunks)
            remapped = [kind.replaced(nodes, replaced, pages[: len(replaced)], owner) for kind in self.kinds.replaced]
        adopted = pages[len(replaced) :]
        if len(adopted):
            self._slots.transfer(adopted, owner, CACHE)
            node = self._attach(node, key[position:end], adopted, pin)
            for kind in self.kinds.attached:
                kind.attached(node, owner)
        if node is not pin.node:
            self.clock += 1
            node.last_access = self.clock
            node.priority = max(node.priority, pin.node.priority)
            self._lock(node)
            self._unlock(pin.node)
            pin.node = node
        pin.num_pages = end // self.index.page_bytes
        return Adoption(replaced, len(adopted), np.concatenate(remapped) if remapped else NO_IDS)

    def insert(self, key: bytes, pages: Ids, owner: int, namespace: str = "", author: str = OPERATOR) -> Adoption:
        """Adopt a whole prefix without keeping a pin on it."""
        pin = Pin(self._root(namespace), 0, author)
        self._lock(pin.node)
        adoption = self.extend_pin(pin, key, pages, owner)
        self.unpin(pin)
        return adoption

    # -- evicting -------------------------------------------------------------------------------------------------

    def evict(self, num_pages: int, why: MissReason = MissReason.EVICTED) -> int:
        """Free `num_pages` unpinned pages, or all there are: leaf by leaf in the policy's order, of the tenant that
        holds the most for its weight (C32), and of the last leaf only its end. Returns how many pages. They are missed
        from then on because of `why`."""
        return self._evict(self._leaves.victims(self.shares, self.retention), num_pages, why)

    def _evict(self, victims: Iterator[Node], num_pages: int, why: MissReason, most_leaves: int = sys.maxsize) -> int:
        freed: list[Ids] = []
        missing = num_pages
        while missing > 0 and len(freed) < most_leaves and (node := next(victims, None)):
            count = len(node.pages)
            if count > missing and not self._at_ends:
                count = missing
                self._split(node, len(node.key) - count * self.index.page_bytes)
            freed.append(node.pages)
            missing -= count
            self._remove_leaf(node, why)
        count = num_pages - missing
        if count:
            self.index.version += 1
            self.num_pages -= count
            self.num_evictable -= count
            self.num_evicted_pages += count
            self._slots.return_ids(np.concatenate(freed), CACHE)
        return count

    def discard(self, key: bytes, start: int, namespace: str) -> int:
        """Drop the page of `key` with number `start`, and all that is cached behind it, unless a part of it is pinned;
        return the number of pages."""
        root, end = self.index.roots.get(namespace), (start + 1) * self.index.page_bytes
        if root is None:
            return 0
        nodes, _, _, position = self.index.walk(root, key, 0, end)
        if position < end or nodes[-1].locks:
            return 0
        node, begin = nodes[-1], sum(len(above.pages) for above in nodes[:-1])
        if start > begin:
            self._split(node, (start - begin) * self.index.page_bytes)
        below = [*self.index.subtree(node)]
        return self._evict(reversed(below), sum(len(each.pages) for each in below), MissReason.EVICTED)

    def lost(self, nodes: Iterable[Node]) -> None:
        """The cache dropped slots of a kind: matches made before are void, and the eviction rank of `nodes` has
        changed."""
        self.index.version += 1
        for node in nodes:
            if not node.children and not node.locks:
                self._leaves.offer(node)

    def flush(self) -> int:
        """Evict everything that is not pinned now, and forget that it was there, unless it was released; returns how
        many pages. All at once: `begin_flush` and `continue_flush` do it in slices."""
        count = self.begin_flush()
        while self.continue_flush():
            pass
        return count

    def begin_flush(self) -> int:
        """Begin to drop all pages that are not pinned now; returns how many. No prefix is retained any longer."""
        self.retention.end_all()
        self._num_to_flush = self.num_evictable
        self._flushes = True
        return self._num_to_flush

    @property
    def flushing(self) -> bool:
        return self._flushes

    def continue_flush(self) -> bool:
        """Evict one slice of the pages to flush; return whether there are more."""
        if not self._flushes:
            return False
        count = self._evict(self._leaves.oldest(), self._num_to_flush, MissReason.EVICTED, _LEAVES_PER_SLICE)
        self._num_to_flush -= count
        if count and self._num_to_flush > 0:
            return True
        self._flushes = False
        for root in list(self.index.roots.values()):
            for node in self.index.subtree(root):
                if tombstones := node.tombstones:
                    node.tombstones = {first: why for first, why in tombstones.items() if why is MissReason.RELEASED}
            self._forget_if_empty(root)
        return False

    def clear(self, *, released: bool = False) -> None:
        """Forget all nodes and pins; the caller frees their slots in the pools. With `released`, later misses report
        that the cache was released."""
        gone = dict(islice(self.index.roots.items(), _MAX_EMPTY_ROOTS)) if released else {}
        self.index.roots.clear()
        self._leaves.clear()
        self.retention.clear()
        self.shares.clear()
        self.num_pages = self.num_evictable = self._num_to_flush = 0
        self._flushes = False
        self.index.version += 1
        if self.watcher is not None:
            self.watcher.cleared()
        for kind in self.kinds:
            kind.clear()
        for name, root in gone.items():
            tombstones = [*root.tombstones.items(), *((first, MissReason.RELEASED) for first in root.children)]
            self._root(name).tombstones = dict(tombstones[-_MAX_RELEASED:])

    def holder(self) -> Holder:
        """The pages that the cache holds, for an audit."""
        return Holder(CACHE, np.concatenate([NO_IDS, *(node.pages for node in self.index.nodes())]))

    def check(self, pins: list[Pin]) -> None:
        """Assert the tree's invariants against the pins that exist: for tests and audits."""
        own: dict[int, int] = {}
        for pin in pins:
            own[id(pin.node)] = own.get(id(pin.node), 0) + 1
        pages = evictable = 0
        held: Counter[str] = Counter()
        for root in self.index.roots.values():
            for node in self.index.subtree(root):
                locked_children = sum(child.locks > 0 for child in node.children.values())
                assert node.locks == own.pop(id(node), 0) + locked_children, "a lock count differs from its holders"
                assert len(node.key) == len(node.pages) * self.index.page_bytes, (
                    "an edge has not one page per page of tokens"
                )
                for first, child in node.children.items():
                    assert child.parent is node, "a child names another parent"
                    assert child.key.startswith(first), "a child stands under another first page"
                pages += len(node.pages)
                held[node.tenant] += len(node.pages)
                evictable += len(node.pages) if node.locks == 0 else 0
        assert not own, "a pin's node is not in the tree"
        assert held == self.shares.held, f"tenants have {held} pages; booked {self.shares.held}"
        self.retention.check()
        for kind in self.kinds.checked:
            kind.check(self.index.nodes())
        assert (pages, evictable) == (self.num_pages, self.num_evictable), (
            f"counted {pages} pages, {evictable} evictable; booked {self.num_pages}, {self.num_evictable}"
        )

    # -- the tree -------------------------------------------------------------------------------------------------

    def _root(self, namespace: str) -> Root:
        root = self.index.roots.get(namespace)
        if root is None:
            root = self.index.roots[namespace] = Root(namespace=namespace)
        return root

    def _forget_if_empty(self, root: Node) -> None:
        assert isinstance(root, Root)
        if root.children or root.locks or (root.tombstones and len(self.index.roots) <= _MAX_EMPTY_ROOTS):
            return
        del self.index.roots[root.namespace]

    def _attach(self, parent: Node, key: bytes, pages: Ids, pin: Pin) -> Node:
        node = Node(key, pages, parent, pin.author, pin.tenant, pin.origin)
        first = key[: self.index.page_bytes]
        parent.children[first] = node
        parent.tombstones.pop(first, None)
        self._leaves.withdraw(parent)  # no longer a leaf
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        self.shares.add(pin.tenant, len(pages))
        if self.watcher is not None:
            self.watcher.changed(node)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after `at` bytes; returns the upper part. `node` stays the deeper one, so pins on it hold."""
        parent, num_pages = node.parent, at // self.index.page_bytes
        assert parent is not None
        upper = Node(node.key[:at], node.pages[:num_pages], parent, node.author, node.tenant, node.origin)
        upper.last_access, upper.hits, upper.priority = node.last_access, node.hits, node.priority
        upper.locks = 1 if node.locks else 0
        parent.children[node.key[: self.index.page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[num_pages:], upper
        upper.children[node.key[: self.index.page_bytes]] = node
        self.index.version += 1
        for kind in self.kinds.resumed:
            kind.split(upper, node)
        if node in self.retention.nodes:
            self.retention.split(upper, node)
        if self.watcher is not None:
            self.watcher.split(upper, node)
        return upper

    def _lock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.locks += 1
            if step.locks > 1:
                return
            self._leaves.withdraw(step)
            self.num_evictable -= len(step.pages)
            step = step.parent

    def _unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            assert step.locks >= 0, "a prefix was unpinned more often than pinned"
            if step.locks:
                return
            self.num_evictable += len(step.pages)
            if step.parent is None:
                self._forget_if_empty(step)
            elif not step.children:
                self._leaves.offer(step)
            step = step.parent

    def _remove_leaf(self, node: Node, why: MissReason) -> None:
        parent = node.parent
        assert parent is not None
        if node in self.retention.nodes:
            self.retention.removed(node)
        for kind in self.kinds.attached:
            kind.removed(node)
        if self.watcher is not None:
            self.watcher.removed(node)
        first = node.key[: self.index.page_bytes]
        del parent.children[first]
        self._leaves.withdraw(node)
        self.shares.add(node.tenant, -len(node.pages))
        tombstones = parent.tombstones
        if len(tombstones) >= (_MAX_RELEASED if why is MissReason.RELEASED else _MAX_TOMBSTONES):
            del tombstones[next(iter(tombstones))]
        tombstones[first] = why
        if parent.children or parent.locks:
            return
        if parent.parent is None:
            self._forget_if_empty(parent)
        else:
            self._leaves.offer(parent)

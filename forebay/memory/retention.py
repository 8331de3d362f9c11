"""Retained prefixes: the prefix cache evicts them last, until their time is over (C8, C19).

A retained prefix ends at a node, with all that a request needs to resume there: the pages of its path, and at its end
the slots of other kinds. It takes no memory from requests: what it retains can be evicted, but after everything else.
If nothing else is left, the prefix whose time ends first loses its retention, in whole: pages, windows and states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from sortedcontainers import SortedList

from forebay.memory.kinds.kind import RetainedKind
from forebay.memory.radix_node import Match, Node
from forebay.memory.slots import Ids, Slots

PAGES: Final = "pages"  # of full KV, beside the names of other kinds


class NotKept(StrEnum):
    """Why a prefix is not retained, if not for a `MissReason`."""

    NOT_ASKED = "not_requested"
    OVER_LIMIT = "over_limit"  # of the pool's part that its tenant may retain
    UNFINISHED = "not_computed"  # the request ended before its prompt was computed


class RetentionRequest(NamedTuple):
    """A client's request to retain the first `num_tokens` of its prompt for `ttl_s` seconds after each use."""

    num_tokens: int
    ttl_s: float


@dataclass(slots=True, eq=False)
class Retained:
    """A prefix of `pages` that ends at `node`, retained until `until`, in seconds of the scheduler's clock; a use moves
    that to `ttl_s` later. The `tenant` is charged for it."""

    node: Node
    pages: Ids
    tenant: str
    ttl_s: float
    until: float
    rank: tuple[float, int]  # its place in the order in which their time ends


class Retention:
    """The retained prefixes of a tree.

    Together the tenants may retain a `fraction` of each pool, and each its part of that by the weights of `tenants`;
    requests without a name have weight 1. `offer` puts a leaf at its new place in the order of eviction. `nodes` has
    how many retained prefixes of a tenant end at a node, plus how many of its children are retained for that tenant. It
    has only nodes with any, so a node in it has only such ancestors.
    """

    def __init__(
        self,
        nodes: dict[Node, Counter[str]],
        pages: Slots,
        kinds: Sequence[RetainedKind],
        offer: Callable[[Node], None],
        *,
        fraction: float,
        tenants: Mapping[str, int],
    ) -> None:
        self.nodes, self._kinds, self._offer = nodes, kinds, offer
        self._tenants, self._fraction = {"": 1, **tenants}, fraction
        self._slots = {PAGES: pages, **{kind.name: kind.slots for kind in kinds}}
        self._at: dict[Node, Retained] = {}
        self._by_time = SortedList()  # (until, number, Retained)
        self._number = 0
        self.held: dict[str, Counter[str]] = {name: Counter() for name in self._slots}  # slots by tenant
        self.num_pages = 0  # that any tenant retains
        self.num_given_up = 0  # prefixes that lost their retention before its time

    def limit(self, tenant: str, pool: str = PAGES) -> int:
        """Return the number of slots of a pool that a tenant may retain."""
        part = self._tenants.get(tenant, 1) / sum(self._tenants.values())
        return int(self._fraction * self._slots[pool].capacity * part)

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def retain(self, match: Match, node: Node, tenant: str, ttl_s: float, now: float) -> Retained | NotKept:
        """Retain the prefix that `match` found, which ends at `node`, until `ttl_s` after `now`. If it is retained for
        as long already, that is extended, also if another tenant is charged for it."""
        found = self._at.get(node)
        if found is None or found.ttl_s < ttl_s:
            pages = match.pages
            if not self._has_room(node, pages, tenant, found):
                return NotKept.OVER_LIMIT if found is None else self._extend(found, now)
            if found is not None:
                self.end(found)
            self._number += 1
            found = self._begin(Retained(node, pages, tenant, ttl_s, now + ttl_s, (now + ttl_s, self._number)))
        return self._extend(found, now)

    def __iter__(self) -> Iterator[Retained]:
        """Yield all retained prefixes, in the order in which their time ends."""
        return (found for *_, found in self._by_time)

    def of(self, node: Node) -> Retained | None:
        """Return the longest retained prefix among those that end at a node or above it."""
        step: Node | None = node
        while step is not None:
            if found := self._at.get(step):
                return found
            step = step.parent
        return None

    def is_last(self, node: Node) -> bool:
        """Return whether no other retained prefix continues the one that ends at a node: else its pages stay."""
        return self.nodes[node].total() == 1

    def use(self, node: Node, now: float) -> None:
        """Extend the longest retained prefix of a request that resumes at the end of `node`."""
        if found := self.of(node):
            self._extend(found, now)

    def expire(self, now: float) -> None:
        """End the retention of all prefixes whose time is over."""
        while self._by_time and self._by_time[0][0] <= now:
            self.end(self._by_time[0][-1])

    def give_up(self, frees: Callable[[Node, Ids], bool]) -> bool:
        """End the retention whose time ends first, of those for which evicting the prefix `frees` memory; return
        whether there is any."""
        for found in self:
            if frees(found.node, found.pages):
                self.num_given_up += 1
                self.end(found)
                return True
        return False

    def end(self, found: Retained) -> None:
        """End the retention of one prefix."""
        del self._at[found.node]
        self._by_time.remove((*found.rank, found))
        self._release(found)
        for kind in self._kinds:
            kind.end_retention(found.node, found.pages)
            self.held[kind.name][found.tenant] -= kind.num_retained(found.pages)

    def end_all(self) -> None:
        """End the retention of all prefixes: the cache is flushed."""
        for found in list(self._at.values()):
            self.end(found)

    # -- the tree -----------------------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Handle a retained node cut in two: `lower` is the original node, and its end does not move."""
        self.nodes[upper] = Counter(dict.fromkeys(self.nodes[lower], 1))

    def removed(self, leaf: Node) -> None:
        """Handle a retained leaf that is removed."""
        self.end(self._at[leaf])

    def clear(self) -> None:
        """Forget all prefixes, when the whole cache is cleared."""
        self.nodes.clear()
        self._at.clear()
        self._by_time.clear()
        self.num_pages = 0
        for held in self.held.values():
            held.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _has_room(self, node: Node, pages: Ids, tenant: str, found: Retained | None) -> bool:
        """Return whether a tenant may retain a prefix, in place of `found`."""
        own = found is not None and found.tenant == tenant
        needed = {kind.name: 0 if own else kind.num_retained(pages) for kind in self._kinds}
        needed[PAGES] = self._num_new_pages(node, tenant)
        return all(self.held[pool][tenant] + count <= self.limit(tenant, pool) for pool, count in needed.items())

    def _num_new_pages(self, node: Node, tenant: str) -> int:
        """Return the number of pages on the path to a node that are not retained for a tenant."""
        count, step = 0, node
        while step.parent is not None and tenant not in self.nodes.get(step, ()):
            count, step = count + len(step.pages), step.parent
        return count

    def _begin(self, found: Retained) -> Retained:
        self._at[found.node] = found
        self._by_time.add((*found.rank, found))
        for kind in self._kinds:
            kind.retain(found.node, found.pages)
            self.held[kind.name][found.tenant] += kind.num_retained(found.pages)
        step = found.node
        while step.parent is not None:
            if step not in self.nodes:
                self.nodes[step] = Counter()
                self.num_pages += len(step.pages)
                self._renew(step)
            self.nodes[step][found.tenant] += 1
            if self.nodes[step][found.tenant] > 1:
                break
            self.held[PAGES][found.tenant] += len(step.pages)
            step = step.parent
        return found

    def _release(self, found: Retained) -> None:
        step = found.node
        while step.parent is not None:
            of = self.nodes[step]
            of[found.tenant] -= 1
            if of[found.tenant]:
                break
            del of[found.tenant]
            self.held[PAGES][found.tenant] -= len(step.pages)
            if not of:
                del self.nodes[step]
                self.num_pages -= len(step.pages)
                self._renew(step)
            step = step.parent

    def _extend(self, found: Retained, now: float) -> Retained:
        if now + found.ttl_s > found.until:
            self._by_time.remove((*found.rank, found))
            self._number += 1
            found.until = now + found.ttl_s
            found.rank = (found.until, self._number)
            self._by_time.add((*found.rank, found))
        return found

    def _renew(self, node: Node) -> None:
        """Give a candidate for eviction its new place in the order."""
        if node.rank is not None:
            self._offer(node)

    # -- checking -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that the counts match the retained prefixes, that no tenant retains more than its limit, and that a
        request can resume at the end of each."""
        counts: dict[Node, Counter[str]] = {}
        held: dict[str, Counter[str]] = {name: Counter() for name in self._slots}
        for found in self._at.values():
            step: Node | None = found.node
            pages = 0
            while step is not None and step.parent is not None:
                of = counts.setdefault(step, Counter())
                of[found.tenant] += 1
                pages += len(step.pages)
                step = step.parent if of[found.tenant] == 1 else None
            for kind in self._kinds:
                assert kind.is_retained(found.node, found.pages), f"a retained prefix lacks its {kind.name} slots"
                held[kind.name][found.tenant] += kind.num_retained(found.pages)
        for node, of in counts.items():
            held[PAGES].update(dict.fromkeys(of, len(node.pages)))
        assert counts == self.nodes, "the retained nodes are miscounted"
        assert all(held[pool] == +self.held[pool] for pool in held), f"retained {held}; booked {self.held}"
        assert sum(len(node.pages) for node in counts) == self.num_pages, "the retained pages are miscounted"
        assert len(self._by_time) == len(self._at), "a retained prefix has no time, or a time no prefix"
        for pool, of in held.items():
            for tenant, count in of.items():
                assert count <= self.limit(tenant, pool), f"{tenant!r} retains {count} of {pool}: above its limit"

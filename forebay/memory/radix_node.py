"""The nodes of the prefix tree, the tenants that are charged for them, and what looking something up in it gives."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from sortedcontainers import SortedList

from forebay.memory.miss_reason import MissReason
from forebay.memory.slots import NO_IDS, Ids

TOKEN_BYTES: Final = 4
NAME_BYTES: Final = 8  # of a branch
NOTHING_ELSE: Final[Mapping[str, int]] = {}
OPERATOR: Final = ""  # the author who may see what any author has put into the cache
IDLE_S: Final = 3600.0  # the longest for which Anthropic's clients can ask that a prefix be kept (`"ttl": "1h"`)


class Origin(NamedTuple):
    """How cached tokens came to their slots: by which `mover` of `MOVERS`, for a request that arrived at time `at`."""

    mover: str = "step"
    at: float = 0.0


MOVERS: Final = ("step", "host_store", "host_load", "disk_store", "disk_load", "disk_restore")
COMPUTED: Final = Origin()


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One edge of the tree: `key` tokens (bytes) whose KV is in `pages`.

    `locks` counts the pins that end here plus the children that are locked, so a locked node has only locked ancestors.
    A pin or an unpin stops at the first ancestor whose locks do not change. `author` is the request that put all these
    tokens here, `origin` how; `tenant` is charged for them (C32). `tombstones` say by first page why a child is gone.
    """

    key: bytes = b""
    pages: Ids = field(default_factory=lambda: NO_IDS)
    parent: Node | None = None
    author: str = OPERATOR
    tenant: str = ""
    origin: Origin = COMPUTED
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    last_access: int = 0
    hits: int = 0
    priority: int = 0
    rank: tuple[Any, ...] | None = None  # its place among the leaves that can be evicted
    tombstones: dict[bytes, MissReason] = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Root(Node):
    """Where a namespace begins: no tokens, no pages."""

    namespace: str = ""


def may_see(author: str, of: str) -> bool:
    """Return whether an author may learn of tokens that another author has put into the cache (C29)."""
    return author in (OPERATOR, of)


class Branch(NamedTuple):
    """A node as it was when it was passed. `name` and that of its `parent`, b"" for a root's, stay the same as long as
    tokens are cached there, whatever is split above or below. Of `kept` slots each kind has as many here, in the
    engine's order of kinds; `tokens` are the first of the edge, as its key has them. Only roots have a `namespace`."""

    name: bytes
    parent: bytes
    namespace: str
    author: str
    num_pages: int
    locks: int  # pins that end here, and children that are locked
    hits: int
    idle_s: float
    kept: list[int]
    tokens: bytes


class Match(NamedTuple):
    """How far a prompt is cached and can be resumed: `num_tokens`, whose pages are `pages`; `reason` says why not more.

    It ends `inside` bytes of the key of `node` (all of them, unless the prompt diverges within the edge). The KV of
    `kv_tokens` is there, `kv_reason` says why not more; `resumable` has by kind's name the last place in it at which
    a request can resume. `version` is that of the tree.
    """

    node: Node
    inside: int
    chunks: Sequence[Ids]
    num_tokens: int
    reason: MissReason
    kv_tokens: int
    kv_reason: MissReason
    resumable: Mapping[str, int] = NOTHING_ELSE
    version: int = 0

    @property
    def is_branch(self) -> bool:
        """Whether the KV ends at a point from which cached prompts continue without this one, and not at their end."""
        return self.kv_reason in (MissReason.NONE, MissReason.DIVERGED)

    def given_up(self, reason: MissReason) -> Match:
        """A miss instead of this match, for a hit that cannot be used."""
        return self._replace(node=NO_NODE, inside=0, chunks=(), num_tokens=0, reason=reason)

    @property
    def pages(self) -> Ids:
        return np.concatenate(self.chunks) if self.chunks else NO_IDS


NO_NODE: Final = Root()  # where a match ends that found nothing
MISSES: Final = {reason: Match(NO_NODE, 0, (), 0, reason, 0, reason) for reason in MissReason}  # matches of length 0


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that cannot be evicted while the pin exists: `num_pages` pages from the root to `node`. Pages adopted
    behind it belong to `author`, are of this `origin`, and `tenant` is charged for them."""

    node: Node
    num_pages: int
    author: str = OPERATOR
    tenant: str = ""
    origin: Origin = COMPUTED


class Adoption(NamedTuple):
    """The result of adopting a request's pages: `replaced` are the cache's own pages for those it already had (the
    request's copies of them, from the pin's end on, stay the request's); the ones after them now belong to the cache.
    What goes with `remapped`, some of the replaced ones, is elsewhere from now on."""

    replaced: Ids
    num_adopted: int
    remapped: Ids


class Tenants:
    """The tenants of a prefix cache: their `weights`, 1 for any other, and when each used it last."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.weights = weights
        self._now = 0.0  # of the latest use, in seconds
        self._uses: OrderedDict[str, float] = OrderedDict()  # of those that are not idle, the latest last
        self._idle: set[str] = set()

    def weight(self, tenant: str) -> int:
        """Return the tenant's share weight; 1 if none is configured."""
        return self.weights.get(tenant, 1)

    def use(self, tenant: str, at: float) -> None:
        """Record that the tenant uses the cache, for a request that arrived at time `at` in seconds."""
        self._now = max(self._now, at)
        self._uses[tenant] = self._now
        self._uses.move_to_end(tenant)
        self._idle.discard(tenant)

    @property
    def now(self) -> float:
        """The time of the latest use, in seconds."""
        return self._now

    @property
    def idle(self) -> set[str]:
        """The tenants that have not used the cache for more than `IDLE_S` before its latest use."""
        while self._uses and self._now - next(iter(self._uses.values())) > IDLE_S:
            self._idle.add(self._uses.popitem(last=False)[0])
        return self._idle


class Shares:
    """The number of slots of one pool that the prefix cache holds for each tenant: `held`, without tenants that hold
    none.

    `add` updates a dictionary. The tenants are sorted when `turns` is called, in O(log tenants) for each that has
    changed since.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.held: Counter[str] = Counter()
        self._changed: set[str] = set()
        self._loads: dict[str, float] = {}  # what each holds for its weight, as it stands in `_order`
        self._order = SortedList()  # (load, tenant)

    def add(self, tenant: str, count: int) -> None:
        """Charge `count` pages to a tenant; a negative count returns them."""
        self.held[tenant] += count
        self._changed.add(tenant)

    def clear(self) -> None:
        """Forget all charges, when the whole cache is cleared."""
        self.held.clear()
        self._changed.clear()
        self._loads.clear()
        self._order.clear()

    def turns(self) -> Iterator[tuple[str, int]]:
        """Name the tenant that loses slots next, and the number of slots to leave it, until no tenant has any to lose.

        Idle tenants lose all that they have. Of the others the one that holds the most for its weight loses what it has
        more than the next one, a slot at least. The caller takes slots one after another until no more than those to be
        left are held. A tenant that lost none in its turn is named again when all others have lost what they can: its
        nodes may have been above theirs.
        """
        for tenant in sorted(self._tenants.idle & self.held.keys()):
            yield tenant, 0
        while (yield from self._round()):
            pass

    def _round(self) -> Generator[tuple[str, int], None, bool]:
        """Turns until each tenant has lost none in its last one; returns whether any has lost some."""
        self._sort()
        num_spent, num_before = 0, self.held.total()
        while num_spent < len(self._order):
            _, tenant = self._order[-1 - num_spent]
            before = self.held[tenant]
            yield tenant, self._num_to_leave(tenant, num_spent)
            num_spent += self.held[tenant] == before
            self._sort()
        return self.held.total() < num_before

    def _num_to_leave(self, tenant: str, num_spent: int) -> int:
        others = len(self._order) - num_spent - 1
        load: float = self._order[others - 1][0] if others else 0.0
        return min(int(load * self._tenants.weight(tenant)), self.held[tenant] - 1)

    def _sort(self) -> None:
        for tenant in self._changed:
            if (load := self._loads.pop(tenant, None)) is not None:
                self._order.remove((load, tenant))
            if self.held[tenant]:
                load = self._loads[tenant] = self.held[tenant] / self._tenants.weight(tenant)
                self._order.add((load, tenant))
            else:
                del self.held[tenant]
        self._changed.clear()

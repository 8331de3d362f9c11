"""The recurrent states that the prefix cache keeps, and which of them goes first (C18).

A state costs the same whatever the length of its prefix, so its value is the chance that a request resumes at it. The
tenant that attached it is charged for it, and the one that holds the most for its weight loses the next (C32): first of
its states those that a later one on the same unbranched path shadows; then the ends of paths, the longest unused first;
and last the branching points, unless they are most of what it has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from forebay.memory.kinds.kind import (
    AttachedKind,
    CachedPart,
    CheckedKind,
    Kept,
    ResumedKind,
    RetainedKind,
    TieredKind,
)
from forebay.memory.kinds.state.hybrid_rows import STATE, MambaPool
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import Node, Pin
from forebay.memory.slots import CACHE, NO_SLOT, Holder, Ids, as_ids

_SHADOWED, _END, _BRANCH, _RETAINED = range(4)
_Rank = OrderedDict[Node, None]
_Ranks = tuple[_Rank, _Rank, _Rank, _Rank]


class CachedState:
    """The state after a node's last token. `locks` counts the steps that will copy it."""

    __slots__ = ("locks", "rank", "slot", "tenant")

    def __init__(self, slot: int, tenant: str) -> None:
        self.slot, self.tenant, self.locks, self.rank = slot, tenant, 0, _END


class CachedStates(CachedPart, AttachedKind, ResumedKind, CheckedKind):
    """States at the ends of nodes, by tenant and by rank, the least recently used first.

    Pages with no state at or below them are dead: no request can resume there until one computes a state again.
    """

    name: ClassVar[str] = STATE
    missing: ClassVar[MissReason] = MissReason.STATE_MISSING
    at_ends: ClassVar[bool] = True
    entries: ClassVar[tuple[type, ...]] = (CachedState,)

    def __init__(self, pool: MambaPool) -> None:
        self.slots = self.pool = pool
        self._at: dict[Node, CachedState] = {}
        self._below: dict[Node, int] = {}  # states at or below a node, of those that have any
        self._ranks: defaultdict[str, _Ranks] = defaultdict(
            lambda: (OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict())
        )
        self.retained: set[Node] = set()  # ends of retained prefixes, whose states are evicted last
        self.num_evicted = 0
        self.num_dead_pages = 0

    @property
    def has_useless(self) -> bool:
        """Whether a later state on the same path shadows the next state to evict."""
        victim = next(self._victims(), None) if self.num_cached > self.num_locked else None
        return victim is not None and self._at[victim].rank == _SHADOWED

    def slot_of(self, node: Node) -> int:
        """The slot with the state at the end of `node`, NO_SLOT for none."""
        cached = self._at.get(node)
        return cached.slot if cached else NO_SLOT

    def attach(self, pin: Pin, slot: int, length: int, owner: int) -> bool:
        """Adopt `owner`'s slot, which holds the state after the `length` tokens of the pinned prefix and was written by
        a completed step. Return False, and leave the slot to the owner, if the cache has that state already."""
        node, prefix_len = pin.node, pin.num_pages * self.tree.page_size
        assert prefix_len == length, f"a state after {length} tokens for a prefix of {prefix_len}"
        assert node.parent is not None, "nothing has been read where a prefix begins: the state there is zero"
        if node in self._at:
            self._touch(node)
            return False
        self.pool.transfer(as_ids([slot]), owner, CACHE)
        self._at[node] = CachedState(slot, pin.tenant)
        self.num_cached += 1
        self.shares.add(pin.tenant, 1)
        self._count(node, 1)
        self._place(node)
        self._shadow(node)
        if self.tree.watcher is not None:
            self.tree.watcher.changed(node)
        return True

    def lock(self, node: Node, pages: Ids) -> None:
        """A step will copy the state: it stays until that has completed."""
        cached = self._at[node]
        cached.locks += 1
        self.num_locked += cached.locks == 1

    def unlock(self, node: Node, pages: Ids) -> None:
        cached = self._at[node]
        cached.locks -= 1
        assert cached.locks >= 0, "a state was unlocked more often than locked"
        self.num_locked -= cached.locks == 0

    def last_resumable(self, nodes: Sequence[Node], pages: Ids, longest: int) -> int:
        """Where a node ends with a state."""
        end = found = 0
        for node in nodes:
            end += len(node.pages)
            if end <= longest and node in self._at:
                found = end
        return found

    def num_kept(self, node: Node) -> int:
        return int(node in self._at)

    def evict(self, num_slots: int) -> int:
        """The useless first. Their KV stays until its pages are wanted: it goes before any that can be resumed. If only
        retained states are left, their retention ends, one prefix after another."""
        nodes, victims = list[Node](), self._victims()
        while len(nodes) < num_slots:
            node = next(victims, None)
            if node is not None:
                self._drop(node)
                nodes.append(node)
            elif self.tree.retention.give_up(lambda end, _: self._at[end].locks == 0):
                victims = self._victims()
            else:
                break
        self.num_evicted += len(nodes)
        if nodes:
            self.tree.lost(nodes)
        return len(nodes)

    def _victims(self) -> Iterator[Node]:
        """Where the next state to evict is, each time; the caller evicts it."""
        for tenant, target in self.shares.turns():
            while self.shares.held[tenant] > target and (node := self._next_of(tenant)):
                yield node

    def _next_of(self, tenant: str) -> Node | None:
        shadowed, ends, branches, _ = self._ranks[tenant]
        order = shadowed, ends, branches
        if 2 * len(branches) > self.shares.held[tenant]:
            order = shadowed, branches, ends
        return next((node for rank in order for node in rank if self._at[node].locks == 0), None)

    def _drop(self, node: Node) -> None:
        """Free a node's state."""
        cached = self._at.pop(node)
        assert cached.locks == 0, f"state {cached.slot} goes although a step will copy it"
        self.pool.free(as_ids([cached.slot]), CACHE)
        self.num_cached -= 1
        self.shares.add(cached.tenant, -1)
        del self._ranks[cached.tenant][cached.rank][node]
        self._count(node, -1)
        if self.tree.watcher is not None:
            self.tree.watcher.changed(node)

    def touch(self, node: Node, num_pages: int) -> None:
        if node in self._at:
            self._touch(node)

    def attached(self, node: Node, owner: int) -> None:
        """A leaf without a state has been added."""
        self.num_dead_pages += len(node.pages)
        parent = node.parent
        if parent is not None and parent in self._at and len(parent.children) == 2:
            self._touch(parent)  # its rank has changed

    def split(self, upper: Node, lower: Node) -> None:
        """The state stays at the lower end."""
        if lower in self._below:
            self._below[upper] = self._below[lower]

    def removed(self, node: Node) -> None:
        if node in self._at:
            self._drop(node)
        self.num_dead_pages -= len(node.pages)

    def clear(self) -> None:
        self.pool.clear()
        self._at.clear()
        self._below.clear()
        self._ranks.clear()
        self.retained.clear()
        self.shares.clear()
        self.num_cached = self.num_locked = self.num_dead_pages = 0

    # -- inside -------------------------------------------------------------------------------------------------------

    def _touch(self, node: Node) -> None:
        """Record that a request resumes from this state."""
        cached = self._at[node]
        del self._ranks[cached.tenant][cached.rank][node]
        self._place(node)

    def _place(self, node: Node) -> None:
        cached = self._at[node]
        cached.rank = _RETAINED if node in self.retained else _BRANCH if len(node.children) > 1 else _END
        self._ranks[cached.tenant][cached.rank][node] = None

    def _shadow(self, node: Node) -> None:
        """The states above on the same path, up to the first branching point, are of little use from now on."""
        step = node.parent
        while step is not None and len(step.children) == 1:
            if step in self.retained:
                return
            cached = self._at.get(step)
            if cached is not None:
                ranks = self._ranks[cached.tenant]
                del ranks[cached.rank][step]
                cached.rank = _SHADOWED
                ranks[_SHADOWED][step] = None
                return
            step = step.parent

    def _count(self, node: Node, change: int) -> None:
        """One state more or less at `node`: which pages are dead follows."""
        step: Node | None = node
        while step is not None:
            count = self._below.get(step, 0) + change
            if count == 0:
                del self._below[step]
                self.num_dead_pages += len(step.pages)
            else:
                self._below[step] = count
                if count == change:
                    self.num_dead_pages -= len(step.pages)
            step = step.parent

    # -- checking -----------------------------------------------------------------------------------------------------

    def cached(self, nodes: Iterable[Node]) -> Holder:
        return Holder(CACHE, as_ids([self._at[node].slot for node in nodes if node in self._at]))

    def check(self, nodes: Iterable[Node]) -> None:
        states = locked = dead = 0
        held: Counter[str] = Counter()
        for node in nodes:
            cached, count = self._at.get(node), self._below.get(node, 0)
            dead += len(node.pages) if count == 0 else 0
            below = sum(self._below.get(child, 0) for child in node.children.values())
            assert count == below + (cached is not None), "a node miscounts the states below it"
            if cached is not None:
                states, locked = states + 1, locked + (cached.locks > 0)
                held[cached.tenant] += 1
                assert node in self._ranks[cached.tenant][cached.rank], "a state is missing among the victims"
        booked = (self.num_cached, self.num_locked, self.num_dead_pages)
        assert (states, locked, dead) == booked, f"counted {states}, {locked}, {dead}; booked {booked}"
        assert held == self.shares.held, f"tenants have {held} states; booked {self.shares.held}"
        victims = sum(len(rank) for ranks in self._ranks.values() for rank in ranks)
        assert states == victims == len(self._at), "a node that is gone is still a victim"


class RetainedStates(RetainedKind):
    """The states at the ends of retained prefixes."""

    name: ClassVar[str] = STATE

    def __init__(self, cached: CachedStates) -> None:
        self._states, self.slots = cached, cached.slots

    def num_retained(self, pages: Ids) -> int:
        return 1

    def retain(self, node: Node, pages: Ids) -> None:
        self._states.retained.add(node)
        self._states.touch(node, len(pages))

    def end_retention(self, node: Node, pages: Ids) -> None:
        self._states.retained.remove(node)
        self._states.touch(node, len(pages))

    def is_retained(self, node: Node, pages: Ids) -> bool:
        return node in self._states.retained and self._states.num_kept(node) == 1


class StateTier(TieredKind):
    """States in the tiers of the prefix cache: a node's end that has one gets a copy."""

    name: ClassVar[str] = STATE
    at_ends: ClassVar[bool] = True
    spec_kind: ClassVar[str] = "mamba"
    span: int | None = None

    def __init__(self, cached: CachedStates) -> None:
        self.in_tree = self._states = cached
        self.retained = RetainedStates(cached)

    def of_tier(self, num_slots: int, num_pages: int) -> StateTier:
        return StateTier(CachedStates(MambaPool(num_slots, ledger=self._states.pool.ledger)))

    def kept(self, nodes: Sequence[Node], pages: Ids) -> Kept:
        ends, slots, end = list[int](), list[int](), 0
        for node in nodes:
            end += len(node.pages)
            if end <= len(pages) and (slot := self._states.slot_of(node)) != NO_SLOT:
                ends.append(end)
                slots.append(slot)
        return Kept(as_ids(ends), as_ids(slots))

    def first_read(self, num_pages: int) -> int:
        return num_pages

    def lend(self, pages: Ids, slots: Ids) -> None:
        raise NotImplementedError("a state belongs to the end of a node, not to a page")

    def attach_at(self, pin: Pin, slot: int, owner: int) -> bool:
        return self._states.attach(pin, slot, pin.num_pages * self._states.tree.page_size, owner)

    def free_lent(self, pages: Ids, owner: int) -> None:
        """Do nothing: no slot belongs to a page."""

"""The recurrent states that the prefix cache keeps, and which of them goes first (C18).

A state costs the same whatever the length of its prefix, so what counts is whether anybody will come back to it. The
useless go first: those on a path that nobody left, with a later state further down, for whoever comes that way takes
the later one. Then the ends of paths, the longest unused first; and last the branching points, unless they are most of
what there is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from forebay.memory.mamba_pool import MambaPool
from forebay.memory.radix_node import Node
from forebay.memory.slots import CACHE, PAD, Holder, as_ids

_PASSED, _END, _BRANCH = range(3)


class CachedStates:
    """States at the ends of nodes. Of each rank the least recently used stands first.

    Pages with no state at or below them are dead: nobody can go on from there until somebody computes one again.
    """

    def __init__(self, pool: MambaPool) -> None:
        self.pool = pool
        self._ranks: tuple[OrderedDict[Node, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self.num_states = 0
        self.num_locked = 0
        self.num_evicted = 0
        self.num_dead_pages = 0

    @property
    def num_evictable(self) -> int:
        return self.num_states - self.num_locked

    @property
    def has_useless(self) -> bool:
        """Whether a state can be evicted that nobody will miss."""
        return any(node.state_locks == 0 for node in self._ranks[_PASSED])

    def attach(self, node: Node, slot: int, owner: int) -> bool:
        """Adopt `owner`'s slot as the state at the end of `node`; False, and nothing is done, where there is one."""
        if node.state != PAD:
            self.touch(node)
            return False
        self.pool.transfer(as_ids([slot]), owner, CACHE)
        node.state = slot
        self.num_states += 1
        self._count(node, 1)
        self._place(node)
        self._pass_by(node)
        return True

    def touch(self, node: Node) -> None:
        """Somebody goes on from this state."""
        del self._ranks[node.rank][node]
        self._place(node)

    def lock(self, node: Node) -> None:
        """A step will copy the state: it stays until that has completed."""
        node.state_locks += 1
        self.num_locked += node.state_locks == 1

    def unlock(self, node: Node) -> None:
        node.state_locks -= 1
        assert node.state_locks >= 0, "a state was unlocked more often than locked"
        self.num_locked -= node.state_locks == 0

    def evict(self, num_slots: int) -> list[Node]:
        """Free `num_slots` unlocked states, or all there are; the nodes that lost theirs."""
        nodes = []
        for _ in range(num_slots):
            node = self._next_victim()
            if node is None:
                break
            self.drop(node)
            self.num_evicted += 1
            nodes.append(node)
        return nodes

    def drop(self, node: Node) -> None:
        """Free a node's state."""
        assert node.state_locks == 0, f"state {node.state} goes although a step will copy it"
        self.pool.free(as_ids([node.state]), CACHE)
        node.state = PAD
        self.num_states -= 1
        del self._ranks[node.rank][node]
        self._count(node, -1)

    def clear(self) -> None:
        """Forget every state, locked or not; the slots are not returned."""
        for rank in self._ranks:
            rank.clear()
        self.num_states = self.num_locked = self.num_dead_pages = 0

    # -- what the tree tells --------------------------------------------------------------------------------------

    def attached(self, node: Node) -> None:
        """A leaf without a state has been added."""
        self.num_dead_pages += len(node.pages)
        parent = node.parent
        if parent is not None and parent.state != PAD and len(parent.children) == 2:
            self.touch(parent)  # its rank has changed

    def split(self, upper: Node, lower: Node) -> None:
        """A node has been cut in two: its state stays at its end."""
        upper.num_states = lower.num_states

    def removed(self, node: Node) -> None:
        """A leaf goes, and its state with it."""
        if node.state != PAD:
            self.drop(node)
        self.num_dead_pages -= len(node.pages)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _place(self, node: Node) -> None:
        node.rank = _BRANCH if len(node.children) > 1 else _END
        self._ranks[node.rank][node] = None

    def _pass_by(self, node: Node) -> None:
        """The states above on the same path, up to the first branching point, are of little use from now on."""
        step = node.parent
        while step is not None and len(step.children) == 1:
            if step.state != PAD:
                del self._ranks[step.rank][step]
                step.rank = _PASSED
                self._ranks[_PASSED][step] = None
                return
            step = step.parent

    def _next_victim(self) -> Node | None:
        order = [*self._ranks]
        if 2 * len(self._ranks[_BRANCH]) > self.num_states:
            order = [self._ranks[_PASSED], self._ranks[_BRANCH], self._ranks[_END]]
        return next((node for rank in order for node in rank if node.state_locks == 0), None)

    def _count(self, node: Node, change: int) -> None:
        """One state more or less at `node`: which pages are dead follows."""
        step: Node | None = node
        while step is not None:
            step.num_states += change
            if step.num_states == 0:
                self.num_dead_pages += len(step.pages)
            elif step.num_states == change:
                self.num_dead_pages -= len(step.pages)
            step = step.parent

    # -- checking -------------------------------------------------------------------------------------------------

    def holder(self) -> Holder:
        return Holder(CACHE, as_ids([node.state for rank in self._ranks for node in rank]))

    def check(self, nodes: Iterator[Node]) -> None:
        """Assert that the counts are those of the tree's nodes, roots included."""
        states = locked = dead = 0
        for node in nodes:
            states += node.state != PAD
            locked += node.state_locks > 0
            dead += len(node.pages) if node.num_states == 0 else 0
            below = sum(child.num_states for child in node.children.values())
            assert node.num_states == below + (node.state != PAD), "a node miscounts the states below it"
            assert (node in self._ranks[node.rank]) == (node.state != PAD), "a state is missing among the victims"
        booked = (self.num_states, self.num_locked, self.num_dead_pages)
        assert (states, locked, dead) == booked, f"counted {states}, {locked}, {dead}; booked {booked}"
        assert states == np.sum([len(rank) for rank in self._ranks]), "a node that is gone is still a victim"

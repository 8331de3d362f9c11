"""The content of the prefix cache, which the engine sends in parts, between steps, summed up from the leaves."""

from __future__ import annotations

import asyncio
from typing import Final

from forebay.base.errors import Unavailable
from forebay.engine.client.async_engine import AsyncEngine
from forebay.memory.radix_node import Branch

KEPT_S: Final = 2.0  # for which one look serves all viewers
FORGOTTEN_S: Final = 30.0  # after the last viewer
TREE_TIMEOUT_S: Final = 20.0
_NODES_PER_TURN: Final = 256  # of the event loop, which has answers to send


class Node:
    """A node of the prefix cache, with the totals of its subtree (itself included)."""

    __slots__ = ("branch", "children", "num_bytes", "num_kept", "num_nodes", "num_pages", "num_requests", "parent")

    def __init__(self, branch: Branch, parent: Node | None, num_bytes: int) -> None:
        self.branch, self.parent = branch, parent
        self.children: list[Node] = []
        self.num_nodes, self.num_pages, self.num_bytes = 1, branch.num_pages, num_bytes
        self.num_kept, self.num_requests = list(branch.kept), branch.locks

    @property
    def root(self) -> Node:
        """Return the node without a parent above this one."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def add_to_parent(self) -> None:
        """Once all that is below has been added here."""
        above = self.parent
        if above is None:
            return
        above.num_nodes += self.num_nodes
        above.num_pages += self.num_pages
        above.num_bytes += self.num_bytes
        above.num_kept = [sum(pair) for pair in zip(above.num_kept, self.num_kept, strict=True)]
        # Of the locks of a node one each is a locked child's: the others are pins, which requests hold.
        above.num_requests += self.num_requests - (self.branch.locks > 0)


class Tree:
    """One look at the cache. Parents come before their children."""

    def __init__(self, page_size: int, slot_bytes: dict[str, int]) -> None:
        self.page_size, self._slot_bytes = page_size, slot_bytes
        self.kinds: list[str] = []
        self.roots: list[Node] = []
        self.nodes: dict[bytes, Node] = {}
        self.is_cut = False

    def add(self, branch: Branch) -> None:
        """One that comes twice was evicted and cached again meanwhile."""
        parent = self.nodes.get(branch.parent)
        if branch.name in self.nodes or (branch.parent and parent is None):
            return
        kept = zip(("kv", *self.kinds), (branch.num_pages, *branch.kept), strict=True)
        num_bytes = sum(count * self._slot_bytes.get(kind, 0) for kind, count in kept)
        node = self.nodes[branch.name] = Node(branch, parent, num_bytes)
        (parent.children if parent else self.roots).append(node)


async def look(engine: AsyncEngine) -> Tree:
    """Read the whole prefix cache from the engine in parts, and sum its nodes from the leaves upwards. Between two
    parts the event loop serves other tasks."""
    tree = Tree(engine.info.page_size, engine.info.slot_bytes)
    more = begin = True
    while more:
        part = await engine.tree(begin=begin)
        tree.kinds, tree.is_cut, more, begin = part.kinds, part.is_cut, part.more, False
        for branch in part.branches:
            tree.add(branch)
    for i, node in enumerate(reversed(list(tree.nodes.values()))):
        node.add_to_parent()
        if i % _NODES_PER_TURN == 0:
            await asyncio.sleep(0)
    return tree


class Trees:
    """The last look, for a moment."""

    def __init__(self) -> None:
        self._looking = asyncio.Lock()
        self._tree: Tree | None = None
        self._fresh_until = 0.0
        self._forgetting: asyncio.TimerHandle | None = None

    async def now(self, engine: AsyncEngine) -> Tree:
        """Raises Unavailable."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if self._tree is None or loop.time() > self._fresh_until:
                try:
                    self._tree = await asyncio.wait_for(look(engine), TREE_TIMEOUT_S)
                except TimeoutError as error:
                    raise Unavailable(f"the engine has not told of its cache within {TREE_TIMEOUT_S:g} s") from error
                self._fresh_until = loop.time() + KEPT_S
            if self._forgetting:
                self._forgetting.cancel()
            self._forgetting = loop.call_later(FORGOTTEN_S, self._forget)
            return self._tree

    def _forget(self) -> None:
        self._tree = self._forgetting = None

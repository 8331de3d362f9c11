"""Look-ups in the prefix tree: how much of a prompt is cached, where it resumes, and where it differs from others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

import numpy as np

from forebay.memory.kinds.kind import Kinds
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import MISSES, NOTHING_ELSE, OPERATOR, TOKEN_BYTES, Match, Node, Root, may_see
from forebay.memory.slots import Ids

_MAX_SIBLINGS: Final = 32  # children that are looked at to say where a prompt left the nearest


_Walk = tuple[list[Node], list[Ids], int, int]


class RadixIndex:
    """The prefix tree of each namespace, by its `roots`. `kinds` are what layers keep besides full KV. `version` grows
    with each change after which an earlier match may be wrong."""

    def __init__(self, page_size: int, kinds: Kinds) -> None:
        self.kinds, self._limits = kinds, kinds.resumed  # other kinds end no hit
        self.page_size = page_size
        self.version = 0
        self.page_bytes = page_size * TOKEN_BYTES
        self.roots: dict[str, Root] = {}

    def match(self, key: bytes, namespace: str = "") -> Match:
        """Return the longest cached prefix of `key` in whole pages that can be resumed, without changing the tree."""
        end = len(key) - len(key) % self.page_bytes
        root = self.roots.get(namespace)
        if root is None or not end:
            return MISSES[MissReason.EMPTY if end else MissReason.BELOW_PAGE]
        nodes, chunks, inside, position = self.walk(root, key, 0, end)
        if not nodes:
            return MISSES[self._reason(root, 0, key, 0)]
        node = nodes[-1]
        reason = MissReason.NONE if position == end else self._reason(node, inside, key, position)
        tokens = position // TOKEN_BYTES
        match = Match(node, inside, chunks, tokens, reason, tokens, reason, NOTHING_ELSE, self.version)
        return self._cut(match, nodes) if self._limits else match

    def walk(self, node: Node, key: bytes, position: int, end: int) -> _Walk:
        """Walk down from `node`, whose edge ends at byte `position` of `key`, along the whole pages of
        `key[position:end]` that are in the tree.

        Return the nodes and their pages, the number of bytes of the last node's edge, and the position reached."""
        page_bytes = self.page_bytes
        nodes: list[Node] = []
        chunks: list[Ids] = []
        inside = 0
        while position < end:
            child = node.children.get(key[position : position + page_bytes])
            if child is None:
                break
            nodes.append(child)
            edge = child.key
            inside = len(edge)
            if position + inside > end or not key.startswith(edge, position):
                inside = self._common(key, edge, position, end)
                position += inside
                chunks.append(child.pages[: inside // page_bytes])
                break
            position += inside
            chunks.append(child.pages)
            node = child
        return nodes, chunks, inside, position

    def _reason(self, node: Node, inside: int, key: bytes, position: int) -> MissReason:
        """Return why a walk ended at `position`, which is `inside` bytes into the edge of `node`."""
        if inside < len(node.key):
            return MissReason.DIVERGED
        if why := node.tombstones.get(key[position : position + self.page_bytes]):
            return why
        if isinstance(node, Root):
            return MissReason.EMPTY
        return MissReason.DIVERGED if node.children else MissReason.NOT_CACHED

    def _cut(self, match: Match, nodes: list[Node]) -> Match:
        """Cut a match back to the last place where every kind can be resumed."""
        pages, whole = match.pages, match.num_tokens // self.page_size
        ends = [kind.last_resumable(nodes, pages, whole) for kind in self._limits]
        match = match._replace(
            resumable={kind.name: at * self.page_size for kind, at in zip(self._limits, ends, strict=True)}
        )
        reason = self._limits[ends.index(min(ends))].missing
        while (end := min(ends)) < max(ends):
            ends = [kind.last_resumable(nodes, pages, end) for kind in self._limits]
        if end == whole:
            return match
        if not end:
            return match.given_up(reason)
        start = 0
        for node in nodes:
            if start + len(node.pages) >= end:
                break
            start += len(node.pages)
        return match._replace(
            node=node,
            inside=(end - start) * self.page_bytes,
            chunks=[pages[:end]],
            num_tokens=end * self.page_size,
            reason=reason,
        )

    def differs(self, key: bytes, namespace: str = "", author: str = OPERATOR) -> tuple[int, int]:
        """Return the first position, in tokens, at which `key` differs from the nearest cached prompt, and the token of
        that prompt.

        (-1, -1) if they do not differ, because one of them ends first. The same if another author cached that token:
        the position alone would reveal the other prompt, one token at a time (C29).
        """
        root = self.roots.get(namespace)
        if root is None:
            return -1, -1
        nodes, _, inside, position = self.walk(root, key, 0, len(key) - len(key) % self.page_bytes)
        nearest: Node | None
        if nodes and inside < len(nodes[-1].key):
            nearest, position = nodes[-1], position - inside
            shared = _shared(key, position, nearest.key)
        else:
            near = islice((nodes[-1] if nodes else root).children.values(), _MAX_SIBLINGS)
            seen = ((_shared(key, position, node.key), node) for node in near if may_see(author, node.author))
            shared, nearest = max(seen, key=lambda found: found[0], default=(0, None))
        position += shared
        if nearest is None or position >= len(key) or not may_see(author, nearest.author):
            return -1, -1
        token = nearest.key[shared : shared + TOKEN_BYTES]
        return position // TOKEN_BYTES, int.from_bytes(token, "little", signed=True)

    def _common(self, key: bytes, edge: bytes, position: int, end: int) -> int:
        """Bytes of whole pages that `edge` and `key[position:end]` share; the first page is known to be shared."""
        shared = min(_shared(key, position, edge), end - position)
        return shared - shared % self.page_bytes

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of all namespaces, parents before their children."""
        return chain.from_iterable(map(self.subtree, self.roots.values()))

    @staticmethod
    def subtree(root: Node) -> Iterator[Node]:
        """Yield a node and all nodes below it, parents before their children."""
        stack = [root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _shared(key: bytes, position: int, edge: bytes) -> int:
    """Bytes of whole tokens that `edge` and `key` from `position` on have in common."""
    n = min(len(edge), len(key) - position) // TOKEN_BYTES
    ours = np.frombuffer(key, dtype=np.int32, count=n, offset=position)
    differ = ours != np.frombuffer(edge, dtype=np.int32, count=n)
    return TOKEN_BYTES * (int(differ.argmax()) if differ.any() else n)

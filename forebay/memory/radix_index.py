"""Looking things up in the prefix tree: how far a prompt is cached, where it can resume, and where it leaves others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final

import numpy as np

from forebay.memory.kinds.kind import CachedKind
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import MISSES, NOTHING_ELSE, OPERATOR, TOKEN_BYTES, Match, Node, Root, may_see
from forebay.memory.slots import Ids

_MAX_SIBLINGS: Final = 32  # children that are looked at to say where a prompt left the nearest


_Walk = tuple[list[Node], list[Ids], int, int]


class RadixIndex:
    """A tree per namespace. `kinds` are what layers keep besides full KV; `version` grows whenever a match made before
    may no longer be right."""

    def __init__(self, page_size: int, kinds: Sequence[CachedKind]) -> None:
        self.kinds = tuple(kinds)
        self._limits = tuple(kind for kind in kinds if kind.missing is not MissReason.NONE)  # others end no hit
        self.page_size = page_size
        self.version = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Root] = {}

    def match(self, key: bytes, namespace: str = "") -> Match:
        """The longest cached prefix of `key` in whole pages that can be resumed. Changes nothing."""
        end = len(key) - len(key) % self._page_bytes
        root = self._roots.get(namespace)
        if root is None or not end:
            return MISSES[MissReason.EMPTY if end else MissReason.BELOW_PAGE]
        nodes, chunks, inside, position = self._walk(root, key, 0, end)
        if not nodes:
            return MISSES[self._reason(root, 0, key, 0)]
        node = nodes[-1]
        reason = MissReason.NONE if position == end else self._reason(node, inside, key, position)
        tokens = position // TOKEN_BYTES
        match = Match(node, inside, chunks, tokens, reason, tokens, reason, NOTHING_ELSE, self.version)
        return self._cut(match, nodes) if self._limits else match

    def _walk(self, node: Node, key: bytes, position: int, end: int) -> _Walk:
        """Down from `node`, whose edge ends at `position` of `key`, along `key[position:end]` as far as whole pages of
        it are there: the nodes and their pages, how many bytes of the last one's edge, and the position reached."""
        page_bytes = self._page_bytes
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
        """Why a walk ended at `position`, so far inside of `node`."""
        if inside < len(node.key):
            return MissReason.DIVERGED
        if why := node.tombstones.get(key[position : position + self._page_bytes]):
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
            inside=(end - start) * self._page_bytes,
            chunks=[pages[:end]],
            num_tokens=end * self.page_size,
            reason=reason,
        )

    def differs(self, key: bytes, namespace: str = "", author: str = OPERATOR) -> tuple[int, int]:
        """Where `key` leaves the nearest cached prompt: the position in tokens, and the token there.

        (-1, -1) where it does not, because it or the cached one ends first, and where the token there is not
        `author`'s: even the position would tell somebody else's prompt, one guess at a time (C29).
        """
        root = self._roots.get(namespace)
        if root is None:
            return -1, -1
        nodes, _, inside, position = self._walk(root, key, 0, len(key) - len(key) % self._page_bytes)
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
        return shared - shared % self._page_bytes

    @property
    def roots(self) -> list[Root]:
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes of all namespaces, parents before their children."""
        return chain.from_iterable(map(self._subtree, self._roots.values()))

    @staticmethod
    def _subtree(root: Node) -> Iterator[Node]:
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

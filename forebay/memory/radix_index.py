"""Looking things up in the prefix tree: how far a prompt is cached, where it can resume, and where it leaves others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

import numpy as np

from forebay.memory.cached_states import CachedStates
from forebay.memory.cached_windows import CachedWindows
from forebay.memory.mamba_pool import MambaPool
from forebay.memory.miss_reason import MissReason
from forebay.memory.radix_node import OPERATOR, TOKEN_BYTES, Match, Node, Root, no_match
from forebay.memory.slots import PAD, Ids
from forebay.memory.window_pool import WindowPool

_MAX_SIBLINGS: Final = 32  # children that are looked at to say where a prompt left the nearest


class RadixIndex:
    """A tree per namespace. `states` and `windows` are there where layers keep such things."""

    def __init__(self, page_size: int, *, states: MambaPool | None, windows: WindowPool | None) -> None:
        self.states = CachedStates(states) if states else None
        self.windows = CachedWindows(windows) if windows else None
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Root] = {}

    def match(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> Match:
        """The longest cached prefix of `key` in whole pages that can be resumed, at most `max_tokens` long. Changes
        nothing."""
        page_bytes = self._page_bytes
        end = len(key) if max_tokens is None else min(len(key), max_tokens * TOKEN_BYTES)
        end -= end % page_bytes
        root = self._roots.get(namespace)
        if root is None:
            return no_match(MissReason.EMPTY if end else MissReason.BELOW_PAGE)
        node: Node = root
        position, inside = 0, 0
        chunks: list[Ids] = []
        reason = MissReason.NONE if end else MissReason.BELOW_PAGE
        while position < end:
            first = key[position : position + page_bytes]
            child = node.children.get(first)
            if child is None:
                reason = self._reason_at(node, first, node is root)
                break
            edge = child.key
            length = len(edge)
            if position + length <= end and key.startswith(edge, position):
                chunks.append(child.pages)
            else:
                length = self._common(key, edge, position, end)
                chunks.append(child.pages[: length // page_bytes])
                if position + length < end:
                    reason = MissReason.DIVERGED
            node, inside = child, length
            position += length
            if length < len(edge):
                break
        tokens = position // TOKEN_BYTES
        match = Match(node, inside, chunks, tokens, reason, tokens, tokens, tokens, reason)
        return match if self.states is None and self.windows is None else self._resumable(match)

    def _resumable(self, match: Match) -> Match:
        """Cut a match back to where every kind can be resumed."""
        pages, whole = match.pages, match.num_tokens // self.page_size
        state_ends = [whole] if self.states is None else self._state_ends(match)
        end = resumable = state_ends[0]
        window_end = whole
        if (windows := self.windows) is not None:
            window_end = windows.last_resumable(pages, whole)
            end = window_end
            if self.states is not None:
                end = next(at for at in state_ends if windows.last_resumable(pages, at) == at)
        if end == whole:
            return match
        node, start = match.node, whole - match.inside // self._page_bytes
        while start >= end and node.parent is not None:
            node = node.parent
            start -= len(node.pages)
        return Match(
            node,
            (end - start) * self._page_bytes,
            [pages[:end]],
            end * self.page_size,
            MissReason.STATE_MISSING if resumable <= window_end else MissReason.WINDOW_MISSING,
            match.kv_tokens,
            window_end * self.page_size,
            resumable * self.page_size,
            match.reason,
        )

    def _state_ends(self, match: Match) -> list[int]:
        """The numbers of pages after which there is a state on the matched path, the greatest first, and 0."""
        node, end, ends = match.node, match.num_tokens // self.page_size, []
        if match.inside < len(node.key) and node.parent is not None:
            end -= match.inside // self._page_bytes
            node = node.parent
        while node.parent is not None:
            if node.state != PAD:
                ends.append(end)
            end -= len(node.pages)
            node = node.parent
        return [*ends, 0]

    def differs(self, key: bytes, namespace: str = "", author: str = OPERATOR) -> tuple[int, int]:
        """Where `key` leaves the nearest cached prompt: the position in tokens, and the token there.

        (-1, -1) where it does not, because it or the cached one ends first, and where the token there is not
        `author`'s: even the position would tell somebody else's prompt, one guess at a time (C29).
        """
        node: Node | None = self._roots.get(namespace)
        position = 0
        while node is not None:
            nearest, shared = self._nearest_child(node, key, position, author)
            if nearest is None:
                break
            position += shared
            if shared < len(nearest.key):
                if position >= len(key) or not _may_see(author, nearest):
                    break
                token = nearest.key[shared : shared + TOKEN_BYTES]
                return position // TOKEN_BYTES, int.from_bytes(token, "little", signed=True)
            node = nearest
        return -1, -1

    def _nearest_child(self, node: Node, key: bytes, position: int, author: str) -> tuple[Node | None, int]:
        """The child that shares most with `key` from `position` on, and how many bytes: the one that shares a page, or
        one of those that `author` may see."""
        child = node.children.get(key[position : position + self._page_bytes])
        if child is not None:
            return child, _shared(key, position, child.key)
        near = islice(node.children.values(), _MAX_SIBLINGS)
        return max(
            ((other, _shared(key, position, other.key)) for other in near if _may_see(author, other)),
            key=lambda found: found[1],
            default=(None, 0),
        )

    def _common(self, key: bytes, edge: bytes, position: int, end: int) -> int:
        """Bytes of whole pages that `edge` and `key[position:end]` share; the first page is known to be shared."""
        shared = min(_shared(key, position, edge), end - position)
        return shared - shared % self._page_bytes

    @staticmethod
    def _reason_at(node: Node, first: bytes, at_root: bool) -> MissReason:
        if first in node.tombstones:
            return MissReason.EVICTED
        if at_root:
            return MissReason.EMPTY
        return MissReason.DIVERGED if node.children else MissReason.NOT_CACHED

    def _nodes(self) -> Iterator[Node]:
        return chain.from_iterable(map(self._walk, self._roots.values()))

    @staticmethod
    def _walk(root: Node) -> Iterator[Node]:
        stack = [root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _may_see(author: str, node: Node) -> bool:
    return author in (OPERATOR, node.author)


def _shared(key: bytes, position: int, edge: bytes) -> int:
    """Bytes of whole tokens that `edge` and `key` from `position` on have in common."""
    n = min(len(edge), len(key) - position) // TOKEN_BYTES
    ours = np.frombuffer(key, dtype=np.int32, count=n, offset=position)
    differ = ours != np.frombuffer(edge, dtype=np.int32, count=n)
    return TOKEN_BYTES * (int(differ.argmax()) if differ.any() else n)

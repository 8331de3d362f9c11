"""The nodes of the prefix tree, and what looking something up in it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from forebay.memory.miss_reason import MissReason
from forebay.memory.slots import PAD, Ids

TOKEN_BYTES: Final = 4
NO_PAGES: Final[Ids] = np.empty(0, dtype=np.int64)
OPERATOR: Final = ""  # the author who may see what any author has put into the cache


class Node:
    """One edge of the tree: `key` tokens (bytes) whose KV is in `pages`.

    `locks` counts the pins that end here plus the children that are locked, so a locked node has only locked ancestors,
    and a pin or an unpin stops at the first ancestor whose locks do not change. `state` is the slot with the recurrent
    state after the node's last token, PAD for none, and `num_states` how many states there are here and below. `author`
    is who put these tokens here, all of them.
    """

    __slots__ = (
        "author",
        "children",
        "hits",
        "key",
        "last_access",
        "locks",
        "num_states",
        "pages",
        "parent",
        "priority",
        "rank",
        "stamp",
        "state",
        "state_locks",
        "tombstones",
    )

    def __init__(self, key: bytes, pages: Ids, parent: Node | None, author: str = OPERATOR) -> None:
        self.key, self.pages, self.parent, self.author = key, pages, parent, author
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_access = 0
        self.hits = 0
        self.priority = 0
        self.stamp = 0
        self.tombstones: set[bytes] = set()
        self.state = PAD
        self.state_locks = 0
        self.num_states = 0
        self.rank = 0


class Root(Node):
    """Where a namespace begins: no tokens, no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", NO_PAGES, None)
        self.namespace = namespace


class Match(NamedTuple):
    """How far a prompt is cached and can be resumed. `pages` and `num_tokens` say what; `reason` why not more.

    `inside` is how many bytes of `node`'s key match (all of them, unless the prompt diverges within the edge). The KV
    of `kv_tokens` is there, `kv_reason` says why not more; the last places in it at which windows and recurrent states
    allow to go on are `window_tokens` and `state_tokens`, equal to `kv_tokens` where layers keep no such thing.
    """

    node: Node
    inside: int
    chunks: list[Ids]
    num_tokens: int
    reason: MissReason
    kv_tokens: int
    window_tokens: int
    state_tokens: int
    kv_reason: MissReason

    @property
    def is_branch(self) -> bool:
        """Whether the KV ends where cached prompts go on without this one, rather than where they end."""
        return self.kv_reason in (MissReason.NONE, MissReason.DIVERGED)

    def given_up(self) -> Match:
        """What to go on with when the state it ends at cannot be kept: nothing."""
        return self._replace(node=NOWHERE, inside=0, chunks=[], num_tokens=0, reason=MissReason.STATE_MISSING)

    @property
    def pages(self) -> Ids:
        return np.concatenate(self.chunks) if self.chunks else NO_PAGES


NOWHERE: Final = Root("")  # where a match ends in a namespace that does not exist yet


def no_match(reason: MissReason) -> Match:
    return Match(NOWHERE, 0, [], 0, reason, 0, 0, 0, reason)


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that cannot be evicted while this is held: `num_pages` pages from the root to `node`. What is adopted
    behind it is `author`'s."""

    node: Node
    num_pages: int
    author: str = OPERATOR


class Adoption(NamedTuple):
    """What became of a request's pages: `replaced` are the cache's own pages for those it already had (the request's
    copies of them, from the pin's end on, stay the request's); the ones after them now belong to the cache."""

    replaced: Ids
    num_adopted: int

"""The nodes of the prefix tree, and what looking something up in it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from forebay.memory.miss_reason import MissReason
from forebay.memory.slots import NO_IDS, Ids

TOKEN_BYTES: Final = 4
NAME_BYTES: Final = 8  # of a branch
NOTHING_ELSE: Final[Mapping[str, int]] = {}
OPERATOR: Final = ""  # the author who may see what any author has put into the cache


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One edge of the tree: `key` tokens (bytes) whose KV is in `pages`.

    `locks` counts the pins that end here plus the children that are locked, so a locked node has only locked ancestors,
    and a pin or an unpin stops at the first ancestor whose locks do not change. `author` is who put these tokens here,
    all of them. `tombstones` say by first page why a child is gone.
    """

    key: bytes
    pages: Ids
    parent: Node | None
    author: str = OPERATOR
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    last_access: int = 0
    hits: int = 0
    priority: int = 0
    rank: tuple[Any, ...] | None = None  # its place among the leaves that can be evicted
    tombstones: dict[bytes, MissReason] = field(default_factory=dict)


class Root(Node):
    """Where a namespace begins: no tokens, no pages."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        Node.__init__(self, b"", NO_IDS, None)
        self.namespace = namespace


def may_see(author: str, of: str) -> bool:
    """Whether an author may be told what another has put into the cache (C29)."""
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
    that allows to go on. `version` is that of the tree.
    """

    node: Node
    inside: int
    chunks: list[Ids]
    num_tokens: int
    reason: MissReason
    kv_tokens: int
    kv_reason: MissReason
    resumable: Mapping[str, int] = NOTHING_ELSE
    version: int = 0

    @property
    def is_branch(self) -> bool:
        """Whether the KV ends where cached prompts go on without this one, rather than where they end."""
        return self.kv_reason in (MissReason.NONE, MissReason.DIVERGED)

    def given_up(self, reason: MissReason) -> Match:
        """A miss instead of this match, for a hit that cannot be used."""
        return self._replace(node=NO_NODE, inside=0, chunks=[], num_tokens=0, reason=reason)

    @property
    def pages(self) -> Ids:
        return np.concatenate(self.chunks) if self.chunks else NO_IDS


NO_NODE: Final = Root("")  # where a match ends that found nothing


def no_match(reason: MissReason) -> Match:
    return Match(NO_NODE, 0, [], 0, reason, 0, reason)


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that cannot be evicted while this is held: `num_pages` pages from the root to `node`. What is adopted
    behind it is `author`'s."""

    node: Node
    num_pages: int
    author: str = OPERATOR


class Adoption(NamedTuple):
    """What became of a request's pages: `replaced` are the cache's own pages for those it already had (the request's
    copies of them, from the pin's end on, stay the request's); the ones after them now belong to the cache. What goes
    with `remapped`, some of the replaced ones, is elsewhere from now on."""

    replaced: Ids
    num_adopted: int
    remapped: Ids

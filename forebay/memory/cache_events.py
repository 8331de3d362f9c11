"""Events of a prefix cache for routers: pages that it stores or removes, and the other kinds of cache beside them.

The events have the format of vLLM 0.33 (its module `kv_events`): maps with a `type`, in batches
`[time, events, rank]`. A block is a page. Its hash has 64 bits and is keyed; it depends on the tokens in front of the
page and on the namespace, so that two servers with one key give one prefix the same hashes.

A tree reports changed nodes to its `Watched`. Once a step, these nodes are compared with their published pages, and
the differences are the events.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.memory.kinds.kind import TieredKind
from forebay.memory.radix_node import Node, Root
from forebay.memory.slots import Ids
from forebay.memory.tier import Tier

HASH_BYTES: Final = 8
MOST_BLOCKS: Final = 4096  # of a batch: a prefix cache that files bring back at a start is reported in several
FULL_ATTENTION: Final = "full_attention"
RANK: Final = 0  # an engine has one prefix cache

_Hashes = npt.NDArray[np.uint64]


class BlockStored(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Consecutive pages of one prefix are cached in `medium`: in the group `group_idx`, whose layers are of
    `kv_cache_spec_kind`, and read the last `span` tokens. `token_ids` are those of the pages, or none. `extra_keys` has
    for each page a digest of the namespace, None for that of all clients."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str]] | None
    group_idx: int
    kv_cache_spec_kind: str
    span: int | None = msgspec.field(name="kv_cache_spec_sliding_window")
    session_id: None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pages of one group are no longer cached in `medium`."""

    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more, in any medium."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Salt(NamedTuple):
    """The part of a namespace in hashes: `name` is the same on every server, `client` names the
    client's part, "" for none, and `adapter` is the name of the adapter."""

    name: str
    client: str
    adapter: str | None


class Source(NamedTuple):
    """A tier of the prefix cache, its name in events, and the salts of its namespaces."""

    tier: Tier
    medium: str
    salt_of: Callable[[str], Salt]


class _Group(NamedTuple):
    """Layers whose cache is published under one number."""

    number: int
    kind: str
    span: int | None
    part: TieredKind | None  # None for full KV, which all pages of a node have


class _Published:
    """The published pages of a node: the hash of each page, and by group the pages, counted from 1."""

    __slots__ = ("ends", "hashes", "salt")

    def __init__(self, hashes: _Hashes, ends: Sequence[Ids], salt: Salt) -> None:
        self.hashes, self.ends, self.salt = hashes, list(ends), salt

    def cut(self, num_pages: int) -> _Published:
        """Return the part for the first pages, and keep that for the others."""
        upper = _Published(self.hashes[:num_pages], [ends[ends <= num_pages] for ends in self.ends], self.salt)
        self.hashes = self.hashes[num_pages:]
        self.ends = [ends[ends > num_pages] - num_pages for ends in self.ends]
        return upper


class Hasher:
    """Hashes of pages, with a key."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=key[: hashlib.blake2b.MAX_KEY_SIZE])

    def digest(self, data: bytes) -> bytes:
        """Return 8 bytes that stand for `data`."""
        hashed = self._keyed.copy()
        hashed.update(data)
        return hashed.digest()

    def chain(self, before: bytes, key: bytes, page_bytes: int) -> _Hashes:
        """Return the hash of each page of `key`, behind a prefix with the digest `before`."""
        digests = bytearray()
        copy = self._keyed.copy
        for start in range(0, len(key), page_bytes):
            hashed = copy()
            hashed.update(before)
            hashed.update(key[start : start + page_bytes])
            before = hashed.digest()
            digests += before
        return np.frombuffer(bytes(digests), dtype=">u8").astype(np.uint64)


class Watched:
    """The published pages of one tree, and the nodes that have changed since."""

    def __init__(self, source: Source, hasher: Hasher, *, with_tokens: bool) -> None:
        tier, self._medium, self._salt_of = source
        self._hasher, self._with_tokens = hasher, with_tokens
        self._page_size, self._page_bytes = tier.cache.page_size, tier.cache.index.page_bytes
        parts = enumerate(tier.parts.values(), 1)
        self._groups = [
            _Group(0, FULL_ATTENTION, None, None),
            *(_Group(number, part.spec_kind, part.span, part) for number, part in parts),
        ]
        self._published: dict[Node, _Published] = {}
        self._gone: list[_Published] = []  # of nodes that were removed
        self._dropped: list[_Published] = []  # of a whole tree that was cleared
        self._copies = Counter[tuple[int, int]]()  # by group and hash, in namespaces that may have another's hashes
        self._changed: dict[Node, None] = {node: None for node in tier.cache.index.nodes() if node.parent is not None}
        tier.cache.watcher = self

    # -- called by the tree -------------------------------------------------------------------------------------------

    def changed(self, node: Node) -> None:
        """Record that the cache keeps something else for a node than before."""
        self._changed[node] = None

    def split(self, upper: Node, lower: Node) -> None:
        """Record that a node was cut in two: `lower` is the original node."""
        if published := self._published.get(lower):
            self._published[upper] = published.cut(len(upper.pages))
        if lower in self._changed:
            self._changed[upper] = None

    def removed(self, node: Node) -> None:
        """Record that a node is gone."""
        self._changed.pop(node, None)
        if published := self._published.pop(node, None):
            self._gone.append(published)

    def cleared(self) -> None:
        """Record that all nodes are gone."""
        self._dropped += [*self._gone, *self._published.values()]
        self._published.clear()
        self._gone.clear()
        self._changed.clear()

    # -- published ----------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether routers know of nothing that is still in the tree."""
        return not self._published and not self._gone

    @property
    def is_dirty(self) -> bool:
        """Whether routers have to learn something."""
        return bool(self._changed or self._gone or self._dropped)

    @property
    def was_cleared(self) -> bool:
        """Whether all that was published is gone at once."""
        return bool(self._dropped)

    def forget_dropped(self) -> None:
        """Forget the published nodes of a tree that was cleared: routers learn of that otherwise."""
        self._dropped.clear()
        self._copies.clear()

    def take(self, most_blocks: int) -> tuple[list[BlockRemoved], list[BlockStored], int]:
        """Return the events of changed nodes until at least `most_blocks` pages are stored, and the number of these."""
        gone: list[list[int]] = [[] for _ in self._groups]
        for published in (*self._dropped, *self._gone):
            for group, ends in zip(self._groups, published.ends, strict=True):
                gone[group.number] += self._less(group, published, ends)
        self._dropped.clear()
        self._gone.clear()
        stored, num_blocks = list[BlockStored](), 0
        while self._changed and num_blocks < most_blocks:
            for node in self._path(next(iter(self._changed))):
                for event in self._compare(node, gone):
                    stored.append(event)
                    num_blocks += len(event.block_hashes)
                self._changed.pop(node, None)
        removed = [
            BlockRemoved(block_hashes=hashes, medium=self._medium, group_idx=number)
            for number, hashes in enumerate(gone)
            if hashes
        ]
        return removed, stored, num_blocks

    def _path(self, node: Node) -> list[Node]:
        """Return the nodes that lead to `node` and were not published, and then `node`."""
        path, parent = [node], node.parent
        while parent is not None and not isinstance(parent, Root) and parent not in self._published:
            path.append(parent)
            parent = parent.parent
        return path[::-1]

    def _compare(self, node: Node, gone: list[list[int]]) -> Iterator[BlockStored]:
        """Publish the changes of a node, whose parent is published. Removed slots are added to `gone`, by group."""
        published = self._published.get(node)
        if published is None:
            published = self._published[node] = self._hashed(node)
        for group in self._groups:
            ends = _ends(group, node)
            before = published.ends[group.number]
            if len(ends) == len(before) and (ends == before).all():
                continue
            published.ends[group.number] = ends
            more = ends
            if len(before):
                gone[group.number] += self._less(group, published, before[~np.isin(before, ends)])
                more = ends[~np.isin(ends, before)]
            yield from self._stored(group, node, published, self._more(group, published, more))

    def _hashed(self, node: Node) -> _Published:
        """Return the hashes of a node's pages, none of which is published."""
        parent = node.parent
        assert parent is not None
        if isinstance(parent, Root):
            salt = self._salt_of(parent.namespace)
            before = self._hasher.digest(f"namespace {salt.name}".encode())
        else:
            above = self._published[parent]
            salt, before = above.salt, int(above.hashes[-1]).to_bytes(HASH_BYTES, "big")
        hashes = self._hasher.chain(before, node.key, self._page_bytes)
        nothing: Ids = np.zeros(0, dtype=np.int64)
        return _Published(hashes, [nothing] * len(self._groups), salt)

    def _more(self, group: _Group, published: _Published, ends: Ids) -> Ids:
        """Return the pages that were cached nowhere else in the tree under the same hash."""
        return self._count(group, published, ends, 1, 1)

    def _less(self, group: _Group, published: _Published, ends: Ids) -> list[int]:
        """Return the hashes of those pages that are cached nowhere else in the tree under the same hash."""
        hashes: list[int] = published.hashes[self._count(group, published, ends, -1, 0) - 1].tolist()
        return hashes

    def _count(self, group: _Group, published: _Published, ends: Ids, change: int, last: int) -> Ids:
        """Count pages of an adapter's namespace: another load of the same adapter has the same hashes. Return those of
        which there are now `last`, and all pages of other namespaces."""
        if published.salt.adapter is None:
            return ends
        is_last = []
        for number in published.hashes[ends - 1].tolist():
            self._copies[group.number, number] += change
            is_last.append(self._copies[group.number, number] == last)
            if not self._copies[group.number, number]:
                del self._copies[group.number, number]
        return ends[np.array(is_last, dtype=np.bool_)]

    def _stored(self, group: _Group, node: Node, published: _Published, ends: Ids) -> Iterator[BlockStored]:
        """Yield an event for each run of consecutive pages."""
        for first, stop in _runs(ends):
            client = published.salt.client and self._hasher.digest(f"client {published.salt.client}".encode()).hex()
            yield BlockStored(
                block_hashes=published.hashes[first:stop].tolist(),
                parent_block_hash=self._parent_hash(node, published, first),
                token_ids=self._token_ids(node.key, first, stop) if self._with_tokens else [],
                block_size=self._page_size,
                medium=self._medium,
                lora_name=published.salt.adapter,
                extra_keys=[(client,)] * (stop - first) if client else None,
                group_idx=group.number,
                kv_cache_spec_kind=group.kind,
                span=group.span,
            )

    def _parent_hash(self, node: Node, published: _Published, first: int) -> int | None:
        if first:
            return int(published.hashes[first - 1])
        above = self._published.get(node.parent) if node.parent is not None else None
        return int(above.hashes[-1]) if above else None

    def _token_ids(self, key: bytes, first: int, stop: int) -> list[int]:
        tokens = np.frombuffer(key[first * self._page_bytes : stop * self._page_bytes], dtype="<i4")
        ids: list[int] = tokens.tolist()
        return ids


def _runs(ends: Ids) -> Sequence[tuple[int, int]]:
    """Return the first page of each run of consecutive pages, counted from 0, and the one behind its last."""
    if not len(ends):
        return ()
    first, stop = int(ends[0]) - 1, int(ends[-1])
    if stop - first == len(ends):
        return ((first, stop),)
    return [(int(run[0]) - 1, int(run[-1])) for run in np.split(ends, np.flatnonzero(np.diff(ends) > 1) + 1)]


def _ends(group: _Group, node: Node) -> Ids:
    """Return the pages of a node that have something of a group, counted from 1."""
    if group.part is None:
        return np.arange(1, len(node.pages) + 1)
    return group.part.kept([node], node.pages).ends


class CacheEvents:
    """The events of all tiers of an engine's prefix cache, with hashes under `key`. `clock` gives the time of a batch,
    in seconds since 1970."""

    def __init__(self, sources: Sequence[Source], key: bytes, clock: Callable[[], float], *, with_tokens: bool) -> None:
        hasher = Hasher(key)
        self._clock, self._encoder = clock, msgspec.msgpack.Encoder()
        self._trees = [Watched(source, hasher, with_tokens=with_tokens) for source in sources]

    def take(self) -> Iterator[bytes]:
        """Yield encoded batches with the changes since the last call, after a step's commit: one, or several after
        a start with much in files."""
        while any(tree.is_dirty for tree in self._trees):
            if events := self.take_events():
                yield self._encoder.encode([self._clock(), events, RANK])

    def take_events(self) -> list[CacheEvent]:
        """Return the events of one batch, removals first."""
        removed, stored, room = list[CacheEvent](), list[CacheEvent](), MOST_BLOCKS
        if any(tree.was_cleared for tree in self._trees) and all(tree.is_empty for tree in self._trees):
            removed.append(AllBlocksCleared())
            for tree in self._trees:
                tree.forget_dropped()
        for tree in self._trees:
            gone, new, num_blocks = tree.take(room)
            removed += gone
            stored += new
            room = max(0, room - num_blocks)
        return [*removed, *stored]

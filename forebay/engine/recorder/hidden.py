"""Records without tokens: each token becomes a hash of all tokens up to it, so that equal prefixes stay equal.

The key is drawn for one file and stored nowhere. A hash depends on all tokens before it, so frequencies of tokens
cannot be counted, and equal tokens behind different ones differ. Names of clients become hashes as well, those of
tenants numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Final, Self

import numpy as np
from msgspec.structs import replace

from forebay.engine.recorder import mark
from forebay.engine.recorder.replay import Replay
from forebay.memory.adapters import AdapterChanged
from forebay.memory.encodings import Key
from forebay.memory.pictures import rename
from forebay.memory.radix_node import Node
from forebay.requests.transfers import Arrived, Closed, Offered, digest_of
from forebay.scheduler.checked_prefixes import CHECK
from forebay.scheduler.journal import (
    Added,
    Committed,
    Marked,
    Origin,
    Planned,
    Record,
    Recovering,
    Reweighed,
    StepFailed,
    Transferred,
    Unmarked,
)

_DIGEST_BYTES: Final = 16
_PICTURE_BYTES: Final = 32
_LEAST: Final = -1 << 31  # a token is an int32; a hash is below 0, where no id of a picture is


class Chain:
    """The hashes along one sequence of tokens."""

    __slots__ = ("_state",)

    def __init__(self, state: bytes) -> None:
        self._state = state

    def copy(self) -> Self:
        """Return a chain at the same place."""
        return type(self)(self._state)

    def next(self, token: int) -> int:
        """Return the hash of a token, and go on behind it."""
        self._state = hashlib.blake2b(
            self._state + token.to_bytes(4, "little", signed=True), digest_size=_DIGEST_BYTES
        ).digest()
        return _LEAST + (int.from_bytes(self._state[:4], "little") >> 1)


class _Known:
    """A request: its stop tokens, and the chain behind its prompt and behind all of its tokens."""

    def __init__(self, stops: frozenset[int], prompt: Chain) -> None:
        self.stops, self._prompt, self.chain = stops, prompt, prompt.copy()

    def start_over(self) -> None:
        self.chain = self._prompt.copy()


class Hidden:
    """Hides the tokens of one scheduler's records, which it gets in order. `key` is secret."""

    def __init__(self, origin: Origin, key: bytes) -> None:
        self._key, self._origin = key, origin
        self._one_token = origin.config.disaggregation.is_prefill
        self._known: dict[int, _Known] = {}
        self._of_row: dict[int, int] = {}
        self._flights: deque[tuple[int, list[int]]] = deque()  # step, and its requests that sample
        self._tails: dict[bytes, int] = {}  # by nonce the first token that another engine has sent
        self._by_nonce: dict[bytes, int] = {}
        self._digests: dict[bytes, bytes] = {}  # of prompts, by those of the true ones
        self._tenants = _pseudonyms(origin)

    @property
    def origin(self) -> Origin:
        """The origin of the records without tokens."""
        config = self._origin.config
        weights = {self._tenants.get(name, name): weight for name, weight in config.tenants.items()}
        return replace(self._origin, config=dataclasses.replace(config, tenants=weights))

    def all(self, records: list[Record]) -> Iterator[Record]:
        """Yield the records without tokens."""
        prompts = [record for record in records if isinstance(record, Added)]
        hashed = {record.tokens: array("i", self._prompt(record.tokens)[0]) for record in prompts}
        self._digests = {digest_of(_ints(raw)): digest_of(own) for raw, own in hashed.items()}
        for record in records:
            yield self._one(record, hashed)

    def _one(self, record: Record, hashed: dict[bytes, array[int]]) -> Record:
        match record:
            case Added():
                return self._added(record, hashed[record.tokens])
            case Planned():
                self._planned(record)
            case Committed():
                return self._committed(record)
            case StepFailed() | Recovering():
                self._flights.clear()
            case Reweighed():
                for known in self._known.values():
                    known.start_over()
            case Transferred():
                return self._transferred(record)
            case Marked():
                return self._marked(record)
            case AdapterChanged():
                return replace(record, name=self._name(record.name))
            case _:
                pass
        return record

    def _marked(self, record: Marked) -> Record:
        """Hide the tokens and names in the prefix trees of an idle scheduler."""
        scheduler = Replay(origin=self._origin, records=()).scheduler
        marks = mark.Marks(scheduler)
        try:
            mark.put(scheduler, record.state)
        except mark.NoMark as error:
            return Unmarked(record.step, str(error))
        for tier in (scheduler.memory.tiers.device, *scheduler.memory.tiers.all):
            index = tier.cache.index
            roots, chains = [*index.roots.values()], dict[Node, Chain]()
            index.roots.clear()
            for root in roots:
                weights, _, name = root.namespace.partition("/")
                root.namespace = f"{weights}/{self._name(name)}"
                index.roots[root.namespace] = root
                for node in index.subtree(root):
                    self._hide_node(node, chains)
        scheduler.pools.adapters.rename(self._name)
        if scheduler.pools.pictures is not None:
            rename(scheduler.pools.pictures, self._key_of)
        return replace(record, state=marks.take(self._tenants))

    def _key_of(self, key: Key) -> Key:
        namespace, digest, grid, sizes = key
        return self._name(namespace), self._picture(digest), grid, sizes

    def _hide_node(self, node: Node, chains: dict[Node, Chain]) -> None:
        """Hide the tokens of a node whose parent is hidden."""
        chain = chains[node.parent].copy() if node.parent else Chain(self._key)
        node.key = self._hidden(node.key, chain)
        node.author, chains[node] = self._name(node.author), chain
        node.tombstones = {self._hidden(first, chain.copy()): why for first, why in node.tombstones.items()}
        node.children = {self._hidden(first, chain.copy()): child for first, child in node.children.items()}

    def _hidden(self, tokens: bytes, chain: Chain) -> bytes:
        """Hide tokens of the prefix cache, except ids of pictures: they are counted up, and a prompt has placeholders
        in their place."""
        pictures = self._origin.config.pictures
        found = [*_ints(tokens)]
        for i, token in enumerate(found):
            if pictures is not None and token >= pictures.vocab_size:
                chain.next(pictures.placeholder)
            else:
                found[i] = chain.next(token)
        return array("i", found).tobytes()

    def _prompt(self, tokens: bytes) -> tuple[list[int], Chain]:
        chain = Chain(self._key)
        return [chain.next(token) for token in _ints(tokens)], chain

    def _name(self, name: str) -> str:
        if not name or name == CHECK:
            return name
        return hashlib.blake2b(name.encode(), key=self._key, digest_size=8).hexdigest()

    def _picture(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=_PICTURE_BYTES).digest()

    def _added(self, record: Added, tokens: array[int]) -> Added:
        _, chain = self._prompt(record.tokens)
        self._known[record.id] = _Known(frozenset(record.stops), chain)
        if record.rendezvous is not None:
            self._by_nonce[record.rendezvous.nonce] = record.id
        return replace(
            record,
            tokens=tokens.tobytes(),
            stops=(),
            namespace=self._name(record.namespace),
            author=self._name(record.author),
            tenant=self._tenants.get(record.tenant, record.tenant),
            adapter=self._name(record.adapter),
            pictures=tuple(replace(shown, digest=self._picture(shown.digest)) for shown in record.pictures),
        )

    def _planned(self, record: Planned) -> None:
        self._of_row.update(record.admissions)
        rows = np.frombuffer(record.rows, dtype=np.int64)[np.frombuffer(record.sampled, dtype=np.bool_)]
        self._flights.append((record.step, [self._of_row.get(row, -1) for row in rows.tolist()]))

    def _committed(self, record: Committed) -> Committed:
        ids = list[int]()
        while self._flights and not ids:
            step, ids = self._flights.popleft()
            if step == record.step:
                break
        counts = record.num_new or [1] * len(record.token_ids)
        owners = [owner for owner, count in zip(ids, counts, strict=False) for _ in range(count)]
        owners += [-1] * (len(record.token_ids) - len(owners))
        hidden, stopped = list[int](), list[int]()
        for i, (token, owner) in enumerate(zip(record.token_ids, owners, strict=True)):
            known = self._known.get(owner)
            hidden.append(self._next(known, token) if known else 0)
            if known and token in known.stops:
                stopped.append(i)
        return replace(record, token_ids=hidden, stopped=tuple(stopped))

    def _next(self, known: _Known, token: int) -> int:
        return (known.chain.copy() if self._one_token else known.chain).next(token)

    def _transferred(self, record: Transferred) -> Transferred:
        event = record.event
        nonce = event.ticket.nonce
        known = self._known.get(self._by_nonce.get(nonce, -1))
        if isinstance(event, Arrived):
            self._tails[nonce] = event.tail.token_id
            hidden = known.chain.copy().next(event.tail.token_id) if known else 0
            stopped = known is not None and event.tail.token_id in known.stops
            return Transferred.of(
                replace(event, tail=replace(event.tail, token_id=hidden)), record.now, stopped=stopped
            )
        if isinstance(event, Closed) and known and nonce in self._tails:
            known.chain.next(self._tails.pop(nonce))
        if isinstance(event, Offered):
            own = (
                self._digests.get(event.digest) or hashlib.blake2b(event.digest, key=self._key, digest_size=16).digest()
            )
            adapter = replace(event.adapter, name=self._name(event.adapter.name))
            pictures = tuple(map(self._picture, event.pictures))
            return Transferred.of(replace(event, digest=own, adapter=adapter, pictures=pictures), record.now)
        return record


def _pseudonyms(origin: Origin) -> dict[str, str]:
    """Return by name what stands for each tenant. Their order stays, by which the cache breaks ties. A name that the
    scheduler has for something else, such as a kind of cache, stays."""
    tenants = sorted(origin.config.tenants)
    if not tenants:
        return {}
    others = replace(origin, config=dataclasses.replace(origin.config, tenants={}))
    known = mark.texts_of(Replay(origin=others, records=()).scheduler)
    digits = len(str(len(tenants)))
    return {name: f"tenant {number:0{digits}}" for number, name in enumerate(tenants, 1) if name not in known}


def _ints(tokens: bytes) -> array[int]:
    return array("i", tokens)

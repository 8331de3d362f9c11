"""The router's prefix table: which member has computed which beginning of a prompt, as far as the router knows."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Protocol

import msgspec

from forebay.base.errors import InvalidRequest
from forebay.config.engine_config import CacheIsolation
from forebay.http.bodies import parse_json_object
from forebay.http.security import Isolation, Session, Tenant
from forebay.server.api.anthropic.messages_request import BILLING_HEADER

BLOCK_BYTES: Final = 256  # some 60 tokens: a shorter beginning in common saves less than a balanced load
MOST_BLOCKS: Final = 512  # of one prompt; what is behind them has been cached with them or not at all
MOST_IDS: Final = 1 << 22  # token ids in a body: members have limits of their own
MOST_KNOWN: Final = 1 << 16  # blocks of all prompts together, 10 MB
_DIGEST_BYTES: Final = 16
_PROMPT: Final = ("system", "instructions", "messages", "input", "prompt", "text", "input_ids")  # in their texts' order
_ADAPTERS: Final = ("model", "lora_path")  # the fields that can name one
_VOLATILE: Final = re.compile(BILLING_HEADER.encode() + rb'[^"\\]*')  # no two requests have the same

_encode: Final = msgspec.json.Encoder().encode


class PromptBlocks:
    """Computes the keys of prompts in the prefix table. Prompts that share no cache at a server share no key: the
    tenant and the salt are in it by the rules of `--cache-isolation` (decision 11), and so is the adapter.

    Routers with one cluster key compute the same keys, so that a standby can use those of the active router.
    """

    def __init__(self, isolation: CacheIsolation, cluster_key: bytes) -> None:
        self._isolation = Isolation(isolation, cluster_key)
        self._key = blake2b(cluster_key, digest_size=_DIGEST_BYTES).hexdigest()  # no namespace of all clients has it

    def of_body(self, tenant: Tenant, content: bytes) -> list[bytes]:
        """Return the keys for the body of a request; none for a body that a server will refuse."""
        try:
            data = parse_json_object(content, MOST_IDS)
            return blocks_of(data, self._namespace(tenant, data))
        except (InvalidRequest, ValueError, OverflowError):  # a lone surrogate, a number of more than 64 bits
            return []

    def _namespace(self, tenant: Tenant, data: dict[str, Any]) -> bytes:
        session = Session(*(_text(data, name) for name in Session._fields))
        parts = [self._isolation.namespace(tenant, session), *(_text(data, name) for name in _ADAPTERS)]
        return _encode([self._key, *parts])


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def blocks_of(data: dict[str, Any], namespace: bytes = b"") -> list[bytes]:
    """Return hashes of a prompt's whole blocks, each over the namespace and all that is before it, too."""
    text = b"".join(_VOLATILE.sub(b"", _encode(data[name])) for name in _PROMPT if name in data)
    # The bracket at the end of a list stands where the next message, or id, of a longer one does.
    found, before = [], namespace
    for start in range(0, min(len(text) - BLOCK_BYTES, BLOCK_BYTES * MOST_BLOCKS), BLOCK_BYTES):
        before = blake2b(before + text[start : start + BLOCK_BYTES], digest_size=_DIGEST_BYTES).digest()
        found.append(before)
    return found


class Observer(Protocol):
    """The receiver of all changes to a table, in order."""

    def learned(self, blocks: Sequence[bytes], url: str) -> None:
        """Take note that a member has these blocks."""

    def forgot(self, url: str) -> None:
        """Take note that a member has none of the blocks that it had."""


@dataclass(frozen=True, slots=True)
class Match:
    """The blocks at the beginning of a prompt that a member has. If `is_branch`, another prompt continues after them:
    the shared blocks are the beginning of several conversations, and not the last turn of one."""

    num_blocks: int
    is_branch: bool


class Prefixes:
    """A table of bounded size, which evicts the blocks of members that no request has asked for longest."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: OrderedDict[tuple[str, bytes], bool] = OrderedDict()  # whether a prompt goes on behind the block
        self._sizes: Counter[str] = Counter()
        self.observer: Observer | None = None

    def __len__(self) -> int:
        return len(self._known)

    def match(self, blocks: Sequence[bytes], url: str) -> Match:
        """Return what a member has of a prompt. It has no block without those before, which are evicted later."""
        num = bisect_left(range(len(blocks)), True, key=lambda i: (url, blocks[i]) not in self._known)
        return Match(num, num > 0 and self._known[url, blocks[num - 1]])

    def size(self, url: str) -> int:
        """Return the number of blocks that a member has."""
        return self._sizes[url]

    def learn(self, blocks: Sequence[bytes], url: str) -> None:
        """Record that a member has computed these blocks (hashes of prompt beginnings, shortest first)."""
        self.record(blocks, url)
        if self.observer is not None and blocks:
            self.observer.learned(blocks, url)

    def forget(self, url: str) -> None:
        """Forget a member, whose cache is gone."""
        self.drop(url)
        if self.observer is not None:
            self.observer.forgot(url)

    def record(self, blocks: Sequence[bytes], url: str, *, continues: bool = False) -> None:
        """Store blocks of a member without calling the observer, and evict old ones. `continues`: a prompt continues
        after the last block."""
        for block in reversed(blocks):  # beginnings are asked for by more: they stay longer
            key = (url, block)
            self._sizes[url] += key not in self._known
            self._known[key] = self._known.pop(key, False) or continues
            continues = True
        while len(self._known) > self._most:
            (owner, _), _ = self._known.popitem(last=False)
            self._sizes[owner] -= 1

    def drop(self, url: str) -> None:
        """As `forget`, without the observer."""
        if not self._sizes[url]:
            return  # each stream of a server that is gone comes here
        for key in [key for key in self._known if key[0] == url]:
            del self._known[key]
        del self._sizes[url]

    def clear(self) -> None:
        """Forget all members, without the observer."""
        self._known.clear()
        self._sizes.clear()

    def entries(self) -> Iterator[tuple[str, bytes, bool]]:
        """Yield members with each of their blocks, and whether a prompt continues after it, the next block to evict
        first."""
        yield from [(*key, continues) for key, continues in self._known.items()]

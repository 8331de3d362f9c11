"""Encodings of pictures, and which of them have rows (C32).

Encodings lie in blocks of rows, which a picture's tiles share; row 0 is the padding. An encoding that no prompt under
way needs may lose its blocks. The tenant that used an encoding last is charged for its blocks. If blocks are missing,
the tenant that holds the most for its weight loses the encoding that it used longest ago, as in the prefix cache
(decision 51). Steps run in the order of their launch: a step in flight has read or written the rows of an encoding
before a later one writes another into its blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import numpy as np

from forebay.base.pixels import Size
from forebay.config.engine_config import Ledger
from forebay.config.pictures import PictureConfig
from forebay.memory.radix_node import Shares, Tenants
from forebay.memory.slots import NO_IDS, Holder, Ids, Slots

PICTURE: Final = "picture"
NO_ID: Final = 0

Key = tuple[str, bytes, tuple[int, int], tuple[Size, ...]]
"""Of a picture: namespace, digest, grid and the sizes of its tiles."""


@dataclass(slots=True)
class Tile:
    """A tile of a picture: its `size` in pixels, which of the picture's `tokens` are its own, and which bytes of the
    picture's `pixels`. Layers of the encoder are `planned` and `committed` for it, and a tenant was `charged` for
    some. Slices in steps up to `void_through` do not count."""

    size: Size
    tokens: slice
    pixels: slice
    planned: int = 0
    committed: int = 0
    charged: int = 0
    void_through: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Encoding:
    """A picture that the engine knows. Its tokens have ids from `first_id` on. It has its pixels while requests use it:
    `users` counts them by tenant. With `blocks` its tokens have `rows`, and a `tenant` is charged for them. No other
    picture has its `number`."""

    key: Key
    number: int
    num_tokens: int
    tiles: list[Tile]
    first_id: int = NO_ID
    users: Counter[str] = field(default_factory=Counter)  # no entry is 0
    pixels: bytes = b""
    blocks: Ids = field(default_factory=lambda: NO_IDS)
    rows: Ids = field(default_factory=lambda: NO_IDS)
    tenant: str = ""

    @property
    def digest(self) -> bytes:
        return self.key[1]

    @property
    def grid(self) -> tuple[int, int]:
        return self.key[2]

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + self.num_tokens)

    @property
    def payer(self) -> str:
        """Return the tenant whose share of the room has the pixels: the first of those that use them."""
        return next(iter(self.users))


class EncodingRows:
    """The blocks of rows of one engine, and the encodings that have some."""

    def __init__(self, config: PictureConfig, tenants: Tenants, *, ledger: Ledger) -> None:
        self.slots = Slots(PICTURE, config.num_rows // config.block_rows, ledger=ledger)
        self.shares = Shares(tenants)  # blocks
        self._block_rows = config.block_rows
        self._of: dict[str, OrderedDict[int, Encoding]] = {}  # by tenant and number; used last stands last

    def __iter__(self) -> Iterator[Encoding]:
        """Iterate over the encodings that have blocks."""
        return (encoding for own in self._of.values() for encoding in own.values())

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for as many tokens of one picture."""
        return ceil(num_tokens / self._block_rows)

    def take(self, encodings: Sequence[Encoding], tenant: str, in_use: Collection[Encoding]) -> list[Encoding] | None:
        """Give blocks to the encodings of a request that have none, and charge its tenant for all of them.

        Returns the encodings that lost theirs; none of `in_use` does. Returns None, and changes nothing, if too few
        blocks are left beside those of `in_use`.
        """
        missing = [encoding for encoding in encodings if not len(encoding.blocks)]
        needed = sum(self.num_blocks(encoding.num_tokens) for encoding in missing)
        kept = {*in_use, *encodings}
        evictable = (
            sum(len(encoding.blocks) for encoding in self if encoding not in kept)
            if needed > self.slots.num_free
            else 0
        )
        if needed > self.slots.num_free + evictable:
            return None
        for encoding in encodings:
            if len(encoding.blocks):
                self._discharge(encoding)
                self._charge(encoding, tenant)
        self.shares.add(tenant, needed)  # before evicting: what the tenant takes counts against it
        evicted = self._evict(needed, kept)
        self.shares.add(tenant, -needed)
        for encoding in missing:
            self._place(encoding)
            self._charge(encoding, tenant)
        return evicted

    def _evict(self, needed: int, kept: Collection[Encoding]) -> list[Encoding]:
        """Take blocks from others than `kept` until as many as needed are free; there are enough."""
        evicted: list[Encoding] = []
        turns = self.shares.turns()
        while self.slots.num_free < needed:
            tenant, target = next(turns)
            for encoding in [encoding for encoding in self._of.get(tenant, {}).values() if encoding not in kept]:
                if self.slots.num_free >= needed or self.shares.held[tenant] <= target:
                    break
                self.free(encoding)
                evicted.append(encoding)
        return evicted

    def free(self, encoding: Encoding) -> None:
        """Return the encoding's blocks; no-op if it has none."""
        if len(encoding.blocks):
            self._discharge(encoding)
            self.slots.return_ids(encoding.blocks, encoding.number)
            encoding.blocks = encoding.rows = NO_IDS

    def _place(self, encoding: Encoding) -> None:
        size, num_blocks = self._block_rows, self.num_blocks(encoding.num_tokens)
        encoding.blocks = self.slots.take_ids(num_blocks, encoding.number)
        rows = ((encoding.blocks - 1) * size + 1).repeat(size) + np.tile(np.arange(size), num_blocks)
        encoding.rows = rows[: encoding.num_tokens]

    def _charge(self, encoding: Encoding, tenant: str) -> None:
        encoding.tenant = tenant
        self._of.setdefault(tenant, OrderedDict())[encoding.number] = encoding
        self.shares.add(tenant, len(encoding.blocks))

    def _discharge(self, encoding: Encoding) -> None:
        own = self._of[encoding.tenant]
        del own[encoding.number]
        if not own:
            del self._of[encoding.tenant]
        self.shares.add(encoding.tenant, -len(encoding.blocks))

    def clear(self) -> None:
        """Free all blocks, whatever the books say."""
        for encoding in self:
            encoding.blocks = encoding.rows = NO_IDS
        self._of.clear()
        self.slots.clear()
        self.shares.clear()

    def audit(self) -> None:
        """Raise LedgerError, or fail an assertion, unless each block has one holder and is charged to one tenant."""
        self.slots.audit(Holder(encoding.number, encoding.blocks) for encoding in self)
        held = {tenant: sum(len(encoding.blocks) for encoding in own.values()) for tenant, own in self._of.items()}
        assert +self.shares.held == held, f"tenants have {held} blocks; booked {self.shares.held}"

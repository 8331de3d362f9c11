"""Pictures of prompts: ids of their tokens, and who has the memory of their pixels and encodings.

A picture's tokens have ids of their own in `Request.tokens`, from the vocabulary's size upward: one run of ids for each
namespace, digest, grid and sizes of tiles. So the prefix cache compares pictures exactly, as it compares text (C34).

Encodings lie in blocks of rows, which a picture's tiles share; row 0 is the padding. What a request needs is reserved
when it arrives and kept until it ends, so nothing waits for memory in between. Steps run in the order of their launch:
a step in flight has read or written the rows of an encoding before a later one writes another into its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap
from math import ceil
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from forebay.base.counters import Counter
from forebay.base.errors import Overloaded, RequestTooLarge
from forebay.base.pixels import Size, num_pixel_bytes
from forebay.base.units import human_bytes
from forebay.config.engine_config import Ledger
from forebay.config.pictures import PictureConfig
from forebay.memory.holding import Steps
from forebay.memory.slots import NO_IDS, Holder, Ids, Slots

PICTURE: Final = "picture"
END_OF_IDS: Final = 1 << 31  # tokens are int32
NO_ID: Final = 0

_Int = TypeVar("_Int", np.int32, np.int64)

COUNTERS: Final = (
    Counter("pictures", "Pictures of prompts"),
    Counter("picture_hits", "Pictures of prompts whose encoding was there"),
    Counter("encoded_tiles", "Tiles of pictures that were encoded"),
    Counter("evicted_encodings", "Encodings of pictures dropped to make room"),
)

Key = tuple[str, bytes, tuple[int, int], tuple[Size, ...]]
"""Of a picture: namespace, digest, grid and the sizes of its tiles."""


class OutOfIds(Exception):
    """No run of ids is left: the numbering must start again."""


class Pixels(Protocol):
    """A picture that arrives with a request: see `requests.pictures.Picture`."""

    @property
    def digest(self) -> bytes: ...
    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def sizes(self) -> tuple[Size, ...]: ...
    @property
    def pixels(self) -> bytes: ...


def _key(namespace: str, its: Pixels) -> Key:
    return namespace, its.digest, its.grid, its.sizes


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
    """A picture that the engine knows. Its tokens have ids from `first_id` on. With `num_users` requests it has its
    pixels and `blocks`, in which its tokens have `rows`; without users it may have them. No other picture has its
    `number`."""

    key: Key
    number: int
    num_tokens: int
    tiles: list[Tile]
    first_id: int = NO_ID
    num_users: int = 0
    pixels: bytes = b""
    blocks: Ids = field(default_factory=lambda: NO_IDS)
    rows: Ids = field(default_factory=lambda: NO_IDS)

    @property
    def grid(self) -> tuple[int, int]:
        return self.key[2]

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + self.num_tokens)


class Pictures:
    """The pictures of one engine. What has no users and no rows is remembered for its ids: as many tokens of them as
    the prefix cache may have, `num_tokens`."""

    def __init__(self, config: PictureConfig, num_tokens: int, steps: Steps, *, ledger: Ledger = Ledger.RAISE) -> None:
        self.config, self._steps = config, steps
        self.slots = Slots(PICTURE, config.num_rows // config.block_rows, ledger=ledger)
        self.room = max(0, config.cache_bytes - config.num_rows * config.row_bytes)  # bytes of pixels
        self.num_bytes = 0
        self.drops: set[int] = set()  # whose unfinished work the next step forgets
        self.counters: dict[str, float] = dict.fromkeys((counter.name for counter in COUNTERS), 0.0)
        self._most_remembered, self._num_remembered = num_tokens, 0  # tokens
        self._known: dict[Key, Encoding] = {}
        self._numbers: dict[int, Encoding] = {}
        self._cached: OrderedDict[Key, Encoding] = OrderedDict()  # without users, with rows; used last stands last
        self._remembered: OrderedDict[Key, Encoding] = OrderedDict()  # with neither
        self._last_number = 0
        self._next_id = config.vocab_size
        self._taken_ids = NO_IDS  # of the numbering before, sorted

    # -- coming and going ---------------------------------------------------------------------------------------------

    def enter(self, namespace: str, pictures: Sequence[Pixels]) -> list[Encoding]:
        """Count a request as a user of its pictures, and return their encodings. Reserves the memory for all of them.

        Raises RequestTooLarge if they can never fit, Overloaded if they do not fit now, OutOfIds; then nothing has
        changed that anybody could notice.
        """
        keys = [_key(namespace, its) for its in pictures]
        arrived = dict(zip(keys, pictures, strict=True))
        self._check_fits(arrived)
        for key, its in arrived.items():
            self._give_ids(self._known.get(key) or self._begin(key, its))
        unused = [encoding for key in arrived if not (encoding := self._known[key]).num_users]
        for encoding in unused:
            self._wake(encoding, arrived[encoding.key].pixels)
        for encoding in unused:
            self._make_room(encoding)
        encodings = [self._known[key] for key in keys]
        self._forget_oldest()
        for encoding in encodings:
            encoding.num_users += 1
            self.counters["pictures"] += 1
            self.counters["picture_hits"] += all(tile.committed == self.config.num_layers for tile in encoding.tiles)
        return encodings

    def _check_fits(self, arrived: Mapping[Key, Pixels]) -> None:
        tokens = {key: sum(map(self.config.num_tokens, its.sizes)) for key, its in arrived.items()}
        blocks = {key: self._num_blocks(count) for key, count in tokens.items()}
        sizes = {key: num_pixel_bytes(its.sizes) for key, its in arrived.items()}
        num_blocks, num_bytes, size = sum(blocks.values()), sum(sizes.values()), self.config.block_rows
        if num_blocks > self.slots.capacity or num_bytes > self.room:
            raise RequestTooLarge(
                f"the encodings of the pictures take {num_blocks * size} rows, and their pixels "
                f"{human_bytes(num_bytes)}; there is room for {self.slots.capacity * size} rows and "
                f"{human_bytes(self.room)}: send fewer or smaller pictures, or give them more memory "
                "(--mm-cache-bytes)",
                code="picture_capacity_exceeded",
            )
        known = {key: self._known.get(key) for key in arrived}
        missing = sum(blocks[key] for key, its in known.items() if its is None or not len(its.blocks))
        evictable = sum(len(its.blocks) for key, its in self._cached.items() if key not in arrived)
        new = sum(sizes[key] for key, its in known.items() if its is None or not its.num_users)
        if missing > self.slots.num_free + evictable or self.num_bytes + new > self.room:
            # No count of other tenants' pictures is told (C29).
            raise Overloaded(
                f"the encodings of the pictures take {num_blocks * size} rows; of the room for "
                f"{self.slots.capacity * size} (--mm-cache-bytes) less is free now: try again later",
                code="pictures_full",
            )

    def _begin(self, key: Key, its: Pixels) -> Encoding:
        self._last_number += 1
        counts = [0, *accumulate(map(self.config.num_tokens, its.sizes))]
        bytes_ = [0, *accumulate(num_pixel_bytes([size]) for size in its.sizes)]
        places = zip(its.sizes, starmap(slice, pairwise(counts)), starmap(slice, pairwise(bytes_)), strict=True)
        encoding = Encoding(
            key=key,
            number=self._last_number,
            num_tokens=counts[-1],
            tiles=[Tile(*place) for place in places],
        )
        self._known[key] = self._numbers[encoding.number] = encoding
        self._remember(encoding)
        return encoding

    def _wake(self, encoding: Encoding, pixels: bytes) -> None:
        """A picture without users gets one: what it has stays, and it gets its pixels."""
        if self._cached.pop(encoding.key, None) is None:
            del self._remembered[encoding.key]
            self._num_remembered -= encoding.num_tokens
        encoding.pixels = pixels
        self.num_bytes += len(pixels)

    def _make_room(self, encoding: Encoding) -> None:
        if not len(encoding.blocks):
            while self.slots.num_free < self._num_blocks(encoding.num_tokens):
                self._evict()
            self._take_blocks(encoding)

    def _take_blocks(self, encoding: Encoding) -> None:
        size, num_blocks = self.config.block_rows, self._num_blocks(encoding.num_tokens)
        encoding.blocks = self.slots.take_ids(num_blocks, encoding.number)
        rows = ((encoding.blocks - 1) * size + 1).repeat(size) + np.tile(np.arange(size), num_blocks)
        encoding.rows = rows[: encoding.num_tokens]

    def _num_blocks(self, num_tokens: int) -> int:
        return ceil(num_tokens / self.config.block_rows)

    def leave(self, encodings: Iterable[Encoding]) -> None:
        """Count a request that has ended. What nobody uses loses its pixels and its unfinished work."""
        for encoding in encodings:
            encoding.num_users -= 1
            if not encoding.num_users:
                self._let_go(encoding)
        self._forget_oldest()

    def _let_go(self, encoding: Encoding) -> None:
        self.num_bytes -= len(encoding.pixels)
        encoding.pixels = b""
        for tile in encoding.tiles:
            if tile.planned < self.config.num_layers:
                self._begin_again(encoding, tile)
        if any(tile.planned for tile in encoding.tiles):
            self._cached[encoding.key] = encoding
        else:
            self._free(encoding)

    def _evict(self) -> None:
        """Free the rows of the encoding that has been without users for the longest time."""
        _, encoding = self._cached.popitem(last=False)
        self.counters["evicted_encodings"] += 1
        for tile in encoding.tiles:
            self._begin_again(encoding, tile)
        self._free(encoding)

    def _free(self, encoding: Encoding) -> None:
        self.slots.return_ids(encoding.blocks, encoding.number)
        encoding.blocks = encoding.rows = NO_IDS
        self._remember(encoding)

    def _remember(self, encoding: Encoding) -> None:
        self._remembered[encoding.key] = encoding
        self._num_remembered += encoding.num_tokens

    def _forget_oldest(self) -> None:
        """Bound what is remembered for its ids alone."""
        while self._num_remembered > self._most_remembered:
            _, encoding = self._remembered.popitem(last=False)
            self._num_remembered -= encoding.num_tokens
            del self._known[encoding.key], self._numbers[encoding.number]

    # -- ids ----------------------------------------------------------------------------------------------------------

    def stand_for(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which of these ids stand for tokens of pictures. Nothing may take such an id for a token."""
        mask: npt.NDArray[np.bool_] = ids >= self.config.vocab_size
        return mask

    def as_tokens(self, ids: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
        """Return the ids with the model's placeholder where they stand for pictures."""
        return self._with(ids, self.config.placeholder)

    def as_inputs(self, ids: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
        """Return the ids that the model is given: its input id where they stand for pictures."""
        return self._with(ids, self.config.input_id)

    def _with(self, ids: npt.NDArray[_Int], token: int) -> npt.NDArray[_Int]:
        tokens: npt.NDArray[_Int] = np.where(self.stand_for(ids), ids.dtype.type(token), ids)
        return tokens

    def _give_ids(self, encoding: Encoding) -> None:
        """Raises OutOfIds."""
        if encoding.first_id != NO_ID:
            return
        first, taken = self._next_id, self._taken_ids
        while len(clash := taken[np.searchsorted(taken, first) : np.searchsorted(taken, first + encoding.num_tokens)]):
            first = int(clash[-1]) + 1
        if first + encoding.num_tokens > END_OF_IDS:
            raise OutOfIds
        encoding.first_id, self._next_id = first, first + encoding.num_tokens

    def restart_ids(self, in_use: Ids) -> None:
        """Number pictures anew. Those with users keep their ids, and no id of `in_use` is given to another picture:
        call it when the prefix cache has no other ids."""
        for encoding in (*self._cached.values(), *self._remembered.values()):
            encoding.first_id = NO_ID
        self._taken_ids = np.unique(in_use[self.stand_for(in_use)])
        self._next_id = self.config.vocab_size

    # -- progress -----------------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Blocks of encodings without users."""
        return sum(len(encoding.blocks) for encoding in self._cached.values())

    def is_planned(self, encoding: Encoding, tile: int) -> bool:
        """Return whether a launched step, or the one that is being planned, encodes the tile to its end."""
        return encoding.tiles[tile].planned == self.config.num_layers

    def committed(self, step: int, number: int, tile: int, last_layer: int) -> None:
        """Record that a slice has completed, in this step; unless it does not count any more."""
        encoding = self._numbers.get(number)
        if encoding is None or step <= encoding.tiles[tile].void_through:
            return
        encoding.tiles[tile].committed = last_layer
        self.counters["encoded_tiles"] += last_layer == self.config.num_layers

    def _begin_again(self, encoding: Encoding, tile: Tile) -> None:
        """Nothing that was computed of a tile counts, nor what steps in flight compute."""
        if tile.planned and tile.committed < self.config.num_layers:
            self.drops.add(encoding.number)
        tile.planned = tile.committed = tile.charged = 0
        tile.void_through = self._steps.launched

    def forget(self, encodings: Iterable[Encoding]) -> None:
        """Encode these again before they are used again: what was computed of them may not be finite (C30)."""
        for encoding in encodings:
            for tile in encoding.tiles:
                self._begin_again(encoding, tile)

    def start_over(self, drops: Iterable[int]) -> None:
        """No step in flight counts: what is not encoded to its end begins again from the pixels. Those steps were to
        forget the unfinished work `drops`."""
        self.drops.update(drops)
        for encoding in self._known.values():
            for tile in encoding.tiles:
                if tile.committed < self.config.num_layers:
                    charged = tile.charged
                    self._begin_again(encoding, tile)
                    tile.charged = charged  # no work of a tenant's is charged twice

    def clear(self) -> None:
        """Nothing is encoded any more, whatever the books said; users keep their pictures."""
        self.forget(self._known.values())
        self.slots.clear()
        for encoding in self._known.values():
            encoding.blocks = encoding.rows = NO_IDS
        for encoding in self._cached.values():
            self._remember(encoding)
        self._cached.clear()
        for encoding in self._known.values():
            if encoding.num_users:
                self._take_blocks(encoding)
        self._forget_oldest()

    # -- checking -----------------------------------------------------------------------------------------------------

    def audit(self, users: Mapping[int, int]) -> None:
        """Raise LedgerError, or fail an assertion, unless each block has one holder and `users` by number are those
        that are counted."""
        known = [*self._known.values()]
        self.slots.audit(Holder(encoding.number, encoding.blocks) for encoding in known if len(encoding.blocks))
        counted = {encoding.number: encoding.num_users for encoding in known if encoding.num_users}
        assert counted == users, f"pictures count the users {counted}; there are {users}"
        idle = {**self._cached, **self._remembered}
        assert all((key in idle) != bool(its.num_users) for key, its in self._known.items()), "idle pictures have users"
        assert all(bool(len(its.blocks)) == (key not in self._remembered) for key, its in self._known.items())
        assert self.num_bytes == sum(len(its.pixels) for its in known), "bytes of pixels are counted wrongly"
        assert self.num_bytes <= self.room, f"{self.num_bytes} bytes of pixels, of {self.room}"
        assert self._num_remembered == sum(its.num_tokens for its in self._remembered.values())
        runs = sorted((its.first_id, its.num_tokens) for its in known if its.first_id != NO_ID)
        ends = [first + count for first, count in runs]
        assert all(end <= first for end, (first, _) in zip(ends, runs[1:], strict=False)), "pictures share ids"

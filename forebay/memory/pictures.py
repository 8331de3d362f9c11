"""Pictures of prompts: ids of their tokens, and the memory of their pixels and encodings.

A picture's tokens have ids of their own in `Request.tokens`, from the vocabulary's size upward: one run of ids for each
namespace, digest, grid and sizes of tiles. So the prefix cache compares pictures exactly, as it compares text (C34).

A request has the pixels of its pictures from its arrival to its end, in room that tenants share. Encodings have rows
from the turn of a request that needs them, and lose them to others if no prompt under way does (`memory/encodings.py`).
"""

from __future__ import annotations

from collections import Counter as Sum
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, starmap
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from forebay.base.counters import Counter
from forebay.base.errors import Overloaded, RequestTooLarge
from forebay.base.pixels import Size, num_pixel_bytes
from forebay.base.room import Room
from forebay.base.units import human_bytes
from forebay.config.engine_config import Ledger
from forebay.config.pictures import PictureConfig
from forebay.memory.encodings import NO_ID, Encoding, EncodingRows, Key, Tile
from forebay.memory.holding import Steps
from forebay.memory.radix_node import Tenants
from forebay.memory.slots import NO_IDS, Ids

END_OF_IDS: Final = 1 << 31  # tokens are int32

_Int = TypeVar("_Int", np.int32, np.int64)

COUNTERS: Final = (
    Counter("pictures", "Pictures of prompts"),
    Counter("picture_hits", "Pictures of prompts whose encoding was there"),
    Counter("encoded_tiles", "Tiles of pictures that were encoded"),
    Counter("evicted_encodings", "Encodings of pictures dropped to make room"),
)


class OutOfIds(Exception):
    """No run of ids is left: the numbering must start again."""


class Described(Protocol):
    """The identity of a picture: see `requests.pictures.Picture`."""

    @property
    def digest(self) -> bytes: ...
    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def sizes(self) -> tuple[Size, ...]: ...


class Pixels(Described, Protocol):
    """A picture that arrives with a request."""

    @property
    def pixels(self) -> bytes: ...


def _key(namespace: str, picture: Described) -> Key:
    return namespace, picture.digest, picture.grid, picture.sizes


class Pictures:
    """The pictures of one engine. A picture without users and rows is remembered for its ids, up to the number of
    tokens that the prefix cache may have, `num_tokens`. `tenants` are those of the prefix cache."""

    def __init__(
        self, config: PictureConfig, num_tokens: int, steps: Steps, tenants: Tenants, *, ledger: Ledger = Ledger.RAISE
    ) -> None:
        self.config, self._steps = config, steps
        self.rows = EncodingRows(config, tenants, ledger=ledger)
        self.max_bytes = max(0, config.cache_bytes - config.num_rows * config.row_bytes)  # of pixels
        self._room = Room(tenants.weights)  # for them
        self.drops: set[int] = set()  # whose unfinished work the next step forgets
        self.counters: dict[str, float] = dict.fromkeys((counter.name for counter in COUNTERS), 0.0)
        self._most_remembered, self._num_remembered = num_tokens, 0  # tokens
        self._known: dict[Key, Encoding] = {}
        self._numbers: dict[int, Encoding] = {}
        self._remembered: OrderedDict[Key, Encoding] = OrderedDict()  # with neither users nor rows
        self._last_number = 0
        self._next_id = config.vocab_size
        self._taken_ids = NO_IDS  # of the numbering before, sorted

    # -- coming and going ---------------------------------------------------------------------------------------------

    def enter(self, namespace: str, tenant: str, pictures: Sequence[Pixels]) -> list[Encoding]:
        """Count a request as a user of its pictures, and return their encodings. Takes room for the pixels of all.

        Raises RequestTooLarge if they can never fit, Overloaded if their pixels do not fit now, or OutOfIds; then
        nothing has changed.
        """
        keys = [_key(namespace, pixels) for pixels in pictures]
        arrived = dict(zip(keys, pictures, strict=True))
        self._check_fits(tenant, arrived)
        for key, pixels in arrived.items():
            self._give_ids(self._known.get(key) or self._begin(key, pixels))
        encodings = [self._known[key] for key in keys]
        for encoding in encodings:
            if not encoding.users:
                self._wake(encoding, tenant, arrived[encoding.key].pixels)
            encoding.users[tenant] += 1
            self.counters["pictures"] += 1
            self.counters["picture_hits"] += all(tile.committed == self.config.num_layers for tile in encoding.tiles)
        self._forget_oldest()
        return encodings

    def _check_fits(self, tenant: str, arrived: Mapping[Key, Pixels]) -> None:
        num_tokens = [sum(map(self.config.num_tokens, pixels.sizes)) for pixels in arrived.values()]
        sizes = {key: num_pixel_bytes(pixels.sizes) for key, pixels in arrived.items()}
        num_blocks, num_bytes = sum(map(self.rows.num_blocks, num_tokens)), sum(sizes.values())
        capacity, size = self.rows.slots.capacity, self.config.block_rows
        if num_blocks > capacity or num_bytes > self.max_bytes:
            raise RequestTooLarge(
                f"the encodings of the pictures take {num_blocks * size} rows, and their pixels "
                f"{human_bytes(num_bytes)}; there is room for {capacity * size} rows and "
                f"{human_bytes(self.max_bytes)}: send fewer or smaller pictures, or give them more memory "
                "(--mm-cache-bytes)",
                code="picture_capacity_exceeded",
            )
        new = sum(sizes[key] for key in arrived if not ((encoding := self._known.get(key)) and encoding.users))
        if new and not self._room.has_room(tenant, self.max_bytes, new):
            # No count of other tenants' pictures is told (C29).
            raise Overloaded(
                f"the pixels of the pictures take {human_bytes(new)}; of the {human_bytes(self.max_bytes)} for all "
                "requests (--mm-cache-bytes) less is free now, and this API key has its share: try again later",
                code="pictures_full",
            )

    def _begin(self, key: Key, pixels: Described) -> Encoding:
        self._last_number += 1
        counts = [0, *accumulate(map(self.config.num_tokens, pixels.sizes))]
        bytes_ = [0, *accumulate(num_pixel_bytes([size]) for size in pixels.sizes)]
        places = zip(pixels.sizes, starmap(slice, pairwise(counts)), starmap(slice, pairwise(bytes_)), strict=True)
        encoding = Encoding(
            key=key,
            number=self._last_number,
            num_tokens=counts[-1],
            tiles=[Tile(*place) for place in places],
        )
        self._known[key] = self._numbers[encoding.number] = encoding
        self._remember(encoding)
        return encoding

    def _wake(self, encoding: Encoding, tenant: str, pixels: bytes) -> None:
        """A picture without users gets one: what it has stays, and it gets its pixels."""
        if self._remembered.pop(encoding.key, None) is not None:
            self._num_remembered -= encoding.num_tokens
        encoding.pixels = pixels
        self._room.enter(tenant, len(pixels))

    def take_rows(self, encodings: Sequence[Encoding], tenant: str, in_use: Collection[Encoding]) -> bool:
        """Give rows to the encodings of a request that have none, and charge its tenant for all of them. Returns
        whether there are enough beside those of `in_use`; if not, nothing changes."""
        evicted = self.rows.take(encodings, tenant, in_use)
        for encoding in evicted or ():
            self.counters["evicted_encodings"] += 1
            for tile in encoding.tiles:
                self._begin_again(encoding, tile)
            if not encoding.users:
                self._remember(encoding)
        return evicted is not None

    def leave(self, encodings: Iterable[Encoding], tenant: str) -> None:
        """Count a request that has ended. What no request uses loses its pixels and its unfinished work."""
        for encoding in encodings:
            payer, num_bytes = encoding.payer, len(encoding.pixels)
            encoding.users[tenant] -= 1
            encoding.users = +encoding.users
            if not encoding.users:
                self._room.leave(payer, num_bytes)
                self._release(encoding)
            elif payer not in encoding.users:
                self._room.leave(payer, num_bytes)
                self._room.enter(encoding.payer, num_bytes)
        self._forget_oldest()

    def _release(self, encoding: Encoding) -> None:
        encoding.pixels = b""
        for tile in encoding.tiles:
            if tile.planned < self.config.num_layers:
                self._begin_again(encoding, tile)
                tile.charged = 0
        if not any(tile.planned for tile in encoding.tiles):
            self.rows.free(encoding)
        if not len(encoding.blocks):
            self._remember(encoding)

    def _remember(self, encoding: Encoding) -> None:
        for tile in encoding.tiles:
            tile.charged = 0  # whoever uses it next pays for its work
        self._remembered[encoding.key] = encoding
        self._num_remembered += encoding.num_tokens

    def _forget_oldest(self) -> None:
        """Bound the number of pictures that are remembered for their ids alone."""
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
        """Return the ids with the model's placeholder in place of ids of pictures."""
        return _with(self, ids, self.config.placeholder)

    def as_inputs(self, ids: npt.NDArray[_Int]) -> npt.NDArray[_Int]:
        """Return the ids that the model is given: its input id in place of ids of pictures."""
        return _with(self, ids, self.config.input_id)

    def ids_of(self, namespace: str, picture: Described) -> range:
        """Return the ids of a picture that the prefix cache has from an earlier process. Raises OutOfIds."""
        key = _key(namespace, picture)
        encoding = self._known.get(key) or self._begin(key, picture)
        self._give_ids(encoding)
        self._forget_oldest()
        return encoding.ids

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
        for encoding in self._known.values():
            if not encoding.users:
                encoding.first_id = NO_ID
        self._taken_ids = np.unique(in_use[self.stand_for(in_use)])
        self._next_id = self.config.vocab_size

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all pixels."""
        return self._room.num_inside

    # -- progress -----------------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Blocks of encodings without users."""
        return sum(len(encoding.blocks) for encoding in self.rows if not encoding.users)

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
        """Nothing that was computed of a tile counts, nor what steps in flight compute. While requests use the picture,
        no work is charged twice."""
        if tile.planned and tile.committed < self.config.num_layers:
            self.drops.add(encoding.number)
        tile.planned = tile.committed = 0
        tile.void_through = self._steps.launched

    def forget(self, encodings: Iterable[Encoding]) -> None:
        """Encode these again before they are used again: their rows may have values that are not finite (C30)."""
        for encoding in encodings:
            for tile in encoding.tiles:
                self._begin_again(encoding, tile)
                tile.charged = 0

    def start_over(self, drops: Iterable[int]) -> None:
        """Restart from the pixels of each picture whose encoding is not complete: no step in flight counts. The device
        was to forget the unfinished work `drops` in those steps."""
        self.drops.update(drops)
        for encoding in self._known.values():
            for tile in encoding.tiles:
                if tile.committed < self.config.num_layers:
                    self._begin_again(encoding, tile)

    def clear(self) -> None:
        """Nothing is encoded any more, whatever the books said; users keep their pictures."""
        self.forget(self._known.values())
        cached = [encoding for encoding in self.rows if not encoding.users]
        self.rows.clear()
        for encoding in cached:
            self._remember(encoding)
        self._forget_oldest()

    # -- checking -----------------------------------------------------------------------------------------------------

    def audit(self, users: Mapping[int, int]) -> None:
        """Raise LedgerError, or fail an assertion, unless each block has one holder and `users` by number are those
        that are counted."""
        known = [*self._known.values()]
        self.rows.audit()
        counted = {encoding.number: encoding.users.total() for encoding in known if encoding.users}
        assert counted == users, f"pictures count the users {counted}; there are {users}"
        _audit_memory(self, known)
        assert self._num_remembered == sum(encoding.num_tokens for encoding in self._remembered.values())
        runs = sorted((encoding.first_id, encoding.num_tokens) for encoding in known if encoding.first_id != NO_ID)
        ends = [first + count for first, count in runs]
        assert all(end <= first for end, (first, _) in zip(ends, runs[1:], strict=False)), "pictures share ids"


def _with(pictures: Pictures, ids: npt.NDArray[_Int], token: int) -> npt.NDArray[_Int]:
    """Return the ids with a token in place of ids of pictures."""
    tokens: npt.NDArray[_Int] = np.where(pictures.stand_for(ids), ids.dtype.type(token), ids)
    return tokens


def rename(pictures: Pictures, renamed: Callable[[Key], Key]) -> None:
    """Give each picture another key. No request uses one."""
    for encoding in pictures._known.values():
        encoding.key = renamed(encoding.key)
    pictures._known = {encoding.key: encoding for encoding in pictures._known.values()}
    remembered = [(encoding.key, encoding) for encoding in pictures._remembered.values()]
    pictures._remembered = OrderedDict(remembered)


def _audit_memory(pictures: Pictures, known: Sequence[Encoding]) -> None:
    """Fail an assertion unless pixels are there while they are used, and paid for by a tenant that uses them."""
    used = [encoding for encoding in known if encoding.users]
    placed = {encoding.key for encoding in pictures.rows}
    assert all(
        (encoding.key in pictures._remembered) != bool(encoding.users or encoding.key in placed) for encoding in known
    )
    assert all(bool(encoding.pixels) == bool(encoding.users) for encoding in known), "pixels without users"
    assert all(len(encoding.blocks) or not any(tile.planned for tile in encoding.tiles) for encoding in known), (
        "no rows"
    )
    paid = Sum[str]()
    for encoding in used:
        paid[encoding.payer] += len(encoding.pixels)
    booked = {payer: pictures._room.num_of(payer) for payer in paid}
    assert paid == booked, f"tenants have {paid} bytes of pixels; booked {booked}"
    assert pictures.num_bytes == paid.total(), "bytes of pixels are counted wrongly"

"""The bytes of a cache by kind, region and place: gathered into a chunk, scattered from one, and its checksum."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.base.parts import I64
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import Per
from forebay.pools.table import Region
from forebay.transfer.wire.pages import CHUNK_BYTES, KindShape, Piece

U8 = npt.NDArray[np.uint8]
Places = npt.NDArray[Any]  # opaque values, one a place

RUN_BYTES: Final = 4 << 10  # above, a copy of its own costs less than passing a buffer
checksum: Final = xxhash.xxh3_64_intdigest


class Memory(Protocol):
    """One side's regions. What is in a piece lies one region after the other, each place by place."""

    def num_bytes(self, piece: Piece) -> int: ...

    def staging(self, num_bytes: int) -> U8:
        """Return a buffer that suits `gather` and `scatter`."""
        ...

    def gather(self, piece: Piece, out: U8) -> U8:
        """The piece's bytes, in the beginning of `out`."""
        ...

    def scatter(self, piece: Piece, data: U8) -> None: ...

    def sum(self, piece: Piece, staging: U8) -> int:
        """The checksum of what lies there."""
        ...

    def parts(self, piece: Piece) -> list[memoryview]:
        """Where it lies, in order, in runs long enough for a copy of their own; none where it is to be gathered."""
        ...

    def copy(self, piece: Piece, there: HostMemory, places: I64, staging: U8) -> int:
        """To `places` of another engine's memory; the checksum of what was read."""
        ...


def shapes_of(cache: CachePool) -> dict[str, KindShape]:
    """By kind of cache that there is any of."""
    found = {}
    for kind in cache.tables:
        by_token = kind != Per.SLOT
        page_size = cache.page_size if by_token else 1
        sizes = tuple(region.bytes_per_row // page_size for region in cache.regions() if region.kind == kind)
        if sizes:
            found[kind] = KindShape(
                by_token=by_token,
                page_size=page_size,
                num_ids=cache.num_ids[kind],
                bytes_per_place=sizes,
                num_read=cache.num_read.get(kind, 0),
            )
    return found


def chunk_bytes(shapes: Mapping[str, KindShape]) -> int:
    """Return the bytes of the largest chunk: one place of one region always goes in one piece."""
    return max([CHUNK_BYTES, *(size for shape in shapes.values() for size in shape.bytes_per_place)])


def bytes_at(region: Region) -> U8:
    """A view; whoever made the cache keeps it alive."""
    memory = memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address))
    return np.frombuffer(memory.cast("B"), dtype=np.uint8)


def rows(data: U8, shape: KindShape, region: int) -> Places:
    """By place, each an opaque value: numpy moves these whole, and without the interpreter's lock."""
    return data.view(np.dtype(f"V{shape.bytes_per_place[region]}"))


class HostMemory:
    """Runs of places that are long enough are copied and summed where they lie; others pass through a buffer."""

    @classmethod
    def of(cls, cache: CachePool, shapes: Mapping[str, KindShape]) -> Self:
        regions = cache.regions()
        return cls(
            {
                kind: [
                    rows(bytes_at(region), shape, i) for i, region in enumerate(r for r in regions if r.kind == kind)
                ]
                for kind, shape in shapes.items()
            }
        )

    def __init__(self, regions: Mapping[str, Sequence[Places]]) -> None:
        self._regions = regions
        self._runs = Runs()

    def num_bytes(self, piece: Piece) -> int:
        return len(piece.places) * sum(region.itemsize for region in self._of(piece))

    def staging(self, num_bytes: int) -> U8:
        return np.empty(num_bytes, dtype=np.uint8)

    def gather(self, piece: Piece, out: U8) -> U8:
        end = 0
        for region in self._of(piece):
            begin, end = end, end + len(piece.places) * region.itemsize
            # "clip" writes to `out` at once, where "raise" would copy; the places were checked when they were offered.
            region.take(piece.places, out=out[begin:end].view(region.dtype), mode="clip")
        return out[:end]

    def scatter(self, piece: Piece, data: U8) -> None:
        end = 0
        for region in self._of(piece):
            begin, end = end, end + len(piece.places) * region.itemsize
            region[piece.places] = data[begin:end].view(region.dtype)

    def sum(self, piece: Piece, staging: U8) -> int:
        parts = self.parts(piece)
        return sum_of(parts) if parts else checksum(self.gather(piece, staging).data)

    def parts(self, piece: Piece) -> list[memoryview]:
        found = self._runs.of(piece.places)
        if self._are_short(piece, found):
            return []
        firsts = [(int(piece.places[begin]), end - begin) for begin, end in found]
        return [
            flat[first * size : (first + n) * size]
            for region in self._of(piece)
            for size, flat in [(region.itemsize, region.view(np.uint8).data)]
            for first, n in firsts
        ]

    def copy(self, piece: Piece, there: HostMemory, places: I64, staging: U8) -> int:
        found = self._runs.of(piece.places, places)
        if self._are_short(piece, found):
            data = self.gather(piece, staging)
            there.scatter(piece._replace(places=places), data)
            return checksum(data.data)
        total = xxhash.xxh3_64()
        firsts = [(int(piece.places[begin]), int(places[begin]), end - begin) for begin, end in found]
        for region, target in zip(self._of(piece), there._of(piece), strict=True):
            size, ours, theirs = region.itemsize, region.view(np.uint8), target.view(np.uint8)
            for first, to, n in firsts:
                part = ours[first * size : (first + n) * size]
                theirs[to * size : (to + n) * size] = part
                total.update(part.data)
        return total.intdigest()

    def _of(self, piece: Piece) -> Sequence[Places]:
        return self._regions[piece.kind][piece.region : piece.region + piece.num_regions]

    def _are_short(self, piece: Piece, found: Sequence[tuple[int, int]]) -> bool:
        return self.num_bytes(piece) < RUN_BYTES * len(found) * piece.num_regions


def sum_of(parts: Iterable[memoryview]) -> int:
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part)
    return total.intdigest()


class Runs:
    """`runs` of the same arrays as the last time, which chunks of one region after the other have, at once."""

    def __init__(self) -> None:
        self._last: tuple[I64, ...] = ()
        self._found: list[tuple[int, int]] = []

    def of(self, *places: I64) -> list[tuple[int, int]]:
        if len(places) != len(self._last) or any(map(operator.is_not, places, self._last)):
            self._last, self._found = places, runs(*places)
        return self._found


def runs(*places: I64) -> list[tuple[int, int]]:
    """Where each of these goes on place by place: [begin, end) of neighbours merged."""
    cuts = np.flatnonzero(np.any([np.diff(some) != 1 for some in places], axis=0)) + 1
    return list(pairwise([0, *cuts.tolist(), len(places[0])]))

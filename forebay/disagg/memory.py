"""The bytes of a cache by kind, region and place: gathered into a chunk, scattered from one, and its checksum."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.disagg.pages import CHUNK_BYTES, KindShape, Piece
from forebay.pools.cache_pool import CachePool
from forebay.pools.cache_spec import Per
from forebay.pools.table import Region

U8 = npt.NDArray[np.uint8]
Places = npt.NDArray[Any]  # opaque values, one a place

checksum: Final = xxhash.xxh3_64_intdigest


class Memory(Protocol):
    """One side's regions. What is in a piece lies one region after the other, each place by place."""

    def num_bytes(self, piece: Piece) -> int: ...

    def staging(self, num_bytes: int) -> U8:
        """What `gather` fills and `scatter` reads best."""
        ...

    def gather(self, piece: Piece, out: U8) -> U8:
        """The piece's bytes, in the beginning of `out`."""
        ...

    def scatter(self, piece: Piece, data: U8) -> None: ...


def shapes_of(cache: CachePool) -> dict[str, KindShape]:
    """By kind of cache that there is any of."""
    found = {}
    for kind in cache.tables:
        by_token = kind != Per.SLOT
        page_size = cache.page_size if by_token else 1
        sizes = tuple(region.bytes_per_row // page_size for region in cache.regions() if region.kind == kind)
        if sizes:
            found[kind] = KindShape(
                by_token=by_token, page_size=page_size, num_ids=cache.num_ids[kind], bytes_per_place=sizes
            )
    return found


def chunk_bytes(shapes: Mapping[str, KindShape]) -> int:
    """What the largest chunk needs: one place of one region always goes in one piece."""
    return max([CHUNK_BYTES, *(size for shape in shapes.values() for size in shape.bytes_per_place)])


def bytes_at(region: Region) -> U8:
    """A view; whoever made the cache keeps it alive."""
    memory = memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address))
    return np.frombuffer(memory.cast("B"), dtype=np.uint8)


def rows(data: U8, shape: KindShape, region: int) -> Places:
    """By place, each an opaque value: numpy moves these whole, and without the interpreter's lock."""
    return data.view(np.dtype(f"V{shape.bytes_per_place[region]}"))


class HostMemory:
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

    def _of(self, piece: Piece) -> Iterable[Places]:
        return self._regions[piece.kind][piece.region : piece.region + piece.num_regions]

"""Interfaces of memory and transports; the memory of a host and of a GPU: bytes by kind, region and place."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from forebay.base.errors import ConfigError, WireError
from forebay.base.parts import I64
from forebay.config.engine_config import DisaggregationOptions
from forebay.memory.kinds.build import has_pages
from forebay.pools.cache_pool import CachePool
from forebay.pools.cuda_shared import map_shared
from forebay.pools.mover import Region
from forebay.requests.pieces import CHUNK_BYTES, Chunk, KindShape, Piece

U8 = npt.NDArray[np.uint8]
Places = npt.NDArray[Any]  # opaque values, one a place
Bytes = U8 | Tensor  # of one file, or of a part of it

Place = Callable[[int], tuple[int, int]]
"""Of an address the file that it lies in, and the offset there."""

FLAG: Final = "--disaggregation-transfer-backend"
RUN_BYTES: Final = 4 << 10  # above, a copy of its own costs less than passing a buffer
checksum: Final = xxhash.xxh3_64_intdigest
_WORD_BYTES: Final = 8  # of a GPU's checksum
_WORD_MASK: Final = (1 << 64) - 1


class Memory(Protocol):
    """One side's regions. A piece contains one region after the other, each place by place."""

    def num_bytes(self, piece: Piece) -> int:
        """Return the bytes of all places of a piece."""
        ...

    def staging(self, num_bytes: int) -> U8:
        """Return a buffer that suits `gather` and `scatter`."""
        ...

    def gather(self, piece: Piece, out: U8) -> U8:
        """The piece's bytes, in the beginning of `out`."""
        ...

    def scatter(self, piece: Piece, data: U8) -> None:
        """Copy `data`, in the order of `gather`, to the piece's places."""
        ...

    def sum(self, piece: Piece, staging: U8) -> int:
        """Return the checksum of the bytes in these places."""
        ...

    def parts(self, piece: Piece) -> list[memoryview]:
        """Return the memory of the piece, in order, in runs long enough for a copy of their own; none if it must be
        gathered."""
        ...

    def copy(self, piece: Piece, there: Memory, places: I64, staging: U8) -> int:
        """Copy to `places` of another engine's memory, which `of_peer` has returned; return the checksum of the bytes
        read, as `sum` does."""
        ...

    def map_file(self, fd: int, num_bytes: int) -> Bytes:
        """Map a file of another engine's caches, of which `num_bytes` are needed: bytes on the same device. They are
        unmapped with the last view of them. Raises OSError or WireError if it is no such file."""
        ...

    def of_peer(self, regions: Mapping[str, Sequence[tuple[Bytes, int]]]) -> Memory:
        """Return the memory of another engine: by kind the bytes of each region, and how many a place has."""
        ...


class Writer(Protocol):
    """Prefill's end towards one decode engine. One chunk at a time: `begin`, then `advance` until it is complete.
    `holds_places`: between the two it reads this side's places, or writes the other's; `closes_at_once`: `close` ends
    such a write, while other writers are only closed after it; `is_lost`: it will never be known whether the last write
    is over."""

    holds_places: bool
    closes_at_once: bool
    is_lost: bool

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        """`places` are decode's; a transport whose receiver writes by itself does not need them."""
        ...

    def advance(self) -> Chunk | None:
        """The chunk when it has left. OSError or WireError where it never will."""
        ...

    def fileno(self) -> int:
        """To wait for until it takes more; -1: ask again."""
        ...

    def close(self) -> None:
        """Afterwards nothing is read or written any more."""
        ...


class Reader(Protocol):
    """Decode's end of a connection of chunks."""

    def advance(self, target: Callable[[Chunk], list[memoryview]]) -> tuple[Chunk, int, U8 | None] | None:
        """Return the next chunk when it is whole, None before: with the checksum of its bytes and the bytes, which are
        valid until the next call, or None if they are in the memory that `target` returned for it. OSError or WireError
        if no more bytes can arrive."""
        ...

    def divert(self, nonce: bytes) -> None:
        """Discard the rest of a chunk of this ticket."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that is readable when `advance` can continue."""
        ...

    def close(self) -> None:
        """Close the connection; the rest of a chunk under way is lost."""
        ...


class OneSided(Protocol):
    """End of a transport, in this engine, whose writer reaches into decode's memory by itself. `one_machine`: both ends
    must be processes of one machine."""

    @property
    def one_machine(self) -> bool: ...

    def reach(self, pid: int) -> Reach:
        """Decode: be ready for the process `pid` of this machine (0: one of another). OSError where that fails."""
        ...

    def join(self, address: bytes, page_size: int) -> tuple[Writer, dict[str, KindShape]]:
        """Prefill: follow an invitation of a decode engine with pages of `page_size` tokens; what shapes its caches
        have. May wait. OSError or WireError where it leads nowhere."""
        ...


class Reach(Protocol):
    """Decode's end towards one prefill process."""

    @property
    def invitation(self) -> bytes:
        """Bytes that the writer needs to connect."""
        ...

    def writer_is_dead(self) -> bool:
        """Return whether it is certain that no admitted writer can write any more."""
        ...

    def close(self) -> None:
        """Admit no writer any more; an admitted writer may continue until it is dead."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Properties of this engine from which a transport is made."""

    options: DisaggregationOptions
    instance: str
    shapes: dict[str, KindShape]
    memory: Memory
    regions: Sequence[Region]


class Transport:
    """The declaration of a transport, which its module in `forebay.transfer.transports` has as `TRANSPORT`.

    `maps_caches`: writers map decode's caches, so these must be allocated in memory that other processes can map;
    `place` then finds them, and is None otherwise.
    """

    maps_caches = False

    def unfit(self, endpoint: Endpoint, place: Place | None) -> str:
        """Return why this engine cannot use the transport, and the remedy; "" if it can."""
        return ""

    def open(self, endpoint: Endpoint, place: Place | None) -> OneSided | None:
        """Return this engine's end; None if chunks are written to a connection of the session, as those of tcp.

        Raises ConfigError if a library that the transport needs does not start.
        """
        raise NotImplementedError


def shapes_of(cache: CachePool) -> dict[str, KindShape]:
    """By kind of cache that there is any of."""
    found = {}
    for kind in cache.tables:
        by_token = has_pages(kind)
        page_size = cache.page_size if by_token else 1
        sizes = tuple(_bytes_per_place(region, page_size) for region in cache.mover.regions(kind))
        if sizes:
            found[kind] = KindShape(
                by_token=by_token,
                page_size=page_size,
                num_ids=cache.num_ids[kind],
                bytes_per_place=sizes,
                num_read=cache.num_read.get(kind, 0),
            )
    return found


def _bytes_per_place(region: Region, page_size: int) -> int:
    """Return the bytes of a token, of which an entry for several tokens has a part for each."""
    if region.bytes_per_row % page_size:
        raise ConfigError(
            f"--kv-cache-dtype: {region.name} has {region.bytes_per_row} bytes a page of {page_size} tokens, and "
            "transfers move as many of each token: use a larger type, or serve without disaggregation"
        )
    return region.bytes_per_row // page_size


def chunk_bytes(shapes: Mapping[str, KindShape]) -> int:
    """Return the bytes of the largest chunk: one place of one region always goes in one piece."""
    return max([CHUNK_BYTES, *(size for shape in shapes.values() for size in shape.bytes_per_place)])


def bytes_at(region: Region) -> U8:
    """Return a view; the owner of the cache keeps it alive."""
    memory = memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address))
    return np.frombuffer(memory.cast("B"), dtype=np.uint8)


def rows(data: U8, shape: KindShape, region: int) -> Places:
    """By place, each an opaque value: numpy moves these whole, and without the interpreter's lock."""
    return data.view(np.dtype(f"V{shape.bytes_per_place[region]}"))


class HostMemory(Memory):
    """Runs of places that are long enough are copied and summed where they lie; others pass through a buffer."""

    @classmethod
    def of(cls, cache: CachePool, shapes: Mapping[str, KindShape]) -> Self:
        """Return the memory of a cache on the host, by the kinds of `shapes`."""
        return cls(
            {
                kind: [rows(bytes_at(region), shape, i) for i, region in enumerate(cache.mover.regions(kind))]
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

    def map_file(self, fd: int, num_bytes: int) -> U8:
        """Map a file whose owner can no longer shrink it: a write behind its end would be a SIGBUS, which ends the
        process. Raises WireError for any other file."""
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise WireError("the caches of the peer lie in a file that can shrink: it must be sealed")
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        memory.madvise(mmap.MADV_DONTFORK)  # a child of ours must not outlive us with it
        return np.frombuffer(memory, dtype=np.uint8)

    def of_peer(self, regions: Mapping[str, Sequence[tuple[Bytes, int]]]) -> HostMemory:
        return HostMemory(
            {kind: [np.asarray(data).view(f"V{size}") for data, size in of] for kind, of in regions.items()}
        )

    def copy(self, piece: Piece, there: Memory, places: I64, staging: U8) -> int:
        assert isinstance(there, HostMemory)
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
    """Return the checksum of bytes that lie in parts."""
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
        """Return `runs(*places)`."""
        if len(places) != len(self._last) or any(map(operator.is_not, places, self._last)):
            self._last, self._found = places, runs(*places)
        return self._found


def runs(*places: I64) -> list[tuple[int, int]]:
    """Return [begin, end) of the runs in which all of these are consecutive, place by place."""
    cuts = np.flatnonzero(np.any([np.diff(some) != 1 for some in places], axis=0)) + 1
    return list(pairwise([0, *cuts.tolist(), len(places[0])]))


class DeviceMemory(Memory):
    """Steps that wrote the gathered bytes have completed, and no step that will read the scattered bytes has been
    launched: so the stream waits for no other, and each call for its own.

    Bytes that are copied to another engine's memory on the same GPU, and their checksum, never leave the GPU.
    """

    @classmethod
    def of(cls, cache: CachePool, shapes: Mapping[str, KindShape]) -> Self:
        """Return the memory of a cache on a GPU, by the kinds of `shapes`."""
        by_place = {kind: cache.mover.by_place(kind, shape.bytes_per_place) for kind, shape in shapes.items()}
        return cls(by_place, cache.mover.device)

    def __init__(self, regions: Mapping[str, Sequence[Tensor]], device: torch.device) -> None:
        self._regions, self._device = regions, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._factors = torch.empty(0, dtype=torch.int64)

    def num_bytes(self, piece: Piece) -> int:
        return len(piece.places) * sum(region.shape[1] for region in self._of(piece))

    def staging(self, num_bytes: int) -> U8:
        pinned: U8 = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    def gather(self, piece: Piece, out: U8) -> U8:
        end = 0
        with torch.cuda.stream(self._stream):
            places = torch.as_tensor(piece.places, device=self._device)
            for region in self._of(piece):
                begin, end = end, end + len(places) * region.shape[1]
                torch.from_numpy(out[begin:end]).copy_(region.index_select(0, places).flatten(), non_blocking=True)
            self._stream.record_event().synchronize()
        return out[:end]

    def scatter(self, piece: Piece, data: U8) -> None:
        end = 0
        with torch.cuda.stream(self._stream):
            places = torch.as_tensor(piece.places, device=self._device)
            for region in self._of(piece):
                begin, end = end, end + len(places) * region.shape[1]
                rows = torch.from_numpy(data[begin:end]).view(len(places), -1)
                region.index_copy_(0, places, rows.to(self._device, non_blocking=True))
            self._stream.record_event().synchronize()

    def sum(self, piece: Piece, staging: U8) -> int:
        with torch.cuda.stream(self._stream):
            return self._sum_of(self._rows(piece))

    def parts(self, piece: Piece) -> list[memoryview]:
        return []

    def copy(self, piece: Piece, there: Memory, places: I64, staging: U8) -> int:
        assert isinstance(there, DeviceMemory)
        with torch.cuda.stream(self._stream):
            targets, rows = torch.as_tensor(places, device=self._device), self._rows(piece)
            for region, part in zip(there._of(piece), rows, strict=True):
                region.index_copy_(0, targets, part)
            found = self._sum_of(rows)
            self._stream.record_event().synchronize()  # the other process reads what is there
        return found

    def map_file(self, fd: int, num_bytes: int) -> Tensor:
        return map_shared(fd, num_bytes, self._device)

    def of_peer(self, regions: Mapping[str, Sequence[tuple[Bytes, int]]]) -> DeviceMemory:
        by_place = {kind: [torch.as_tensor(data).view(-1, size) for data, size in of] for kind, of in regions.items()}
        return DeviceMemory(by_place, self._device)

    def _rows(self, piece: Piece) -> list[Tensor]:
        places = torch.as_tensor(piece.places, device=self._device)
        return [region.index_select(0, places) for region in self._of(piece)]

    def _sum_of(self, rows: Sequence[Tensor]) -> int:
        """Return the checksum of bytes on the GPU: of each word the product with an odd factor of its own, so that one
        changed word always shows. Waits for it."""
        data = torch.cat([part.flatten() for part in rows])
        words = torch.nn.functional.pad(data, (0, -len(data) % _WORD_BYTES)).view(torch.int64)
        if len(self._factors) < len(words):
            self._factors = torch.from_numpy(_odd_factors(len(words))).to(self._device)
        return int((words * self._factors[: len(words)]).sum()) & _WORD_MASK

    def _of(self, piece: Piece) -> Sequence[Tensor]:
        return self._regions[piece.kind][piece.region : piece.region + piece.num_regions]


def _odd_factors(count: int) -> npt.NDArray[np.int64]:
    """Return the first odd numbers of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def check_all(found: Mapping[str, Sequence[object]], shapes: Mapping[str, KindShape]) -> None:
    """Raise WireError if the peer has announced fewer regions than it keeps."""
    for kind, shape in shapes.items():
        if len(found[kind]) != len(shape.bytes_per_place):
            raise WireError(
                f"the peer has announced {len(found[kind])} regions of {kind}, not {len(shape.bytes_per_place)}"
            )

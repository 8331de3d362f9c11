"""Parts that transports by addresses share: where a peer's regions lie, and chunks as stretches, neighbours on both
sides."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forebay.base.child import process_has_ended
from forebay.base.errors import ConfigError, WireError
from forebay.base.parts import I64
from forebay.requests.pieces import Chunk, KindShape, Piece, chunk_of
from forebay.transfer.wire.memory import (
    FLAG,
    Endpoint,
    HostMemory,
    OneSided,
    Place,
    Reach,
    Transport,
    Writer,
    check_all,
    chunk_bytes,
    runs,
)

Addresses = Mapping[str, Sequence[int]]
"""By kind, of each region."""

RegionList = list[tuple[str, int, int]]
"""By region in order: the kind, where it lies, and how many bytes."""


def _addresses(regions: RegionList) -> Addresses:
    found: dict[str, list[int]] = {}
    for kind, begin, _ in regions:
        found.setdefault(kind, []).append(begin)
    return found


def shapes_there(regions: RegionList, shapes: Mapping[str, KindShape], page_size: int) -> dict[str, KindShape]:
    """Return the shapes of a peer with pages of `page_size` tokens. Raises WireError if its regions differ from
    these."""
    theirs: dict[str, KindShape] = {}
    seen: dict[str, list[int]] = {kind: [] for kind in shapes}
    for kind, _, num_bytes in regions:
        shape, known = shapes.get(kind), theirs.get(kind)
        if shape is None or len(seen[kind]) >= len(shape.bytes_per_place):
            raise WireError(f"the peer has a region of {kind} that is not of this layout")
        size = page_size if shape.by_token else 1
        num_ids = num_bytes // (size * shape.bytes_per_place[len(seen[kind])])
        theirs[kind] = replace(shape, page_size=size, num_ids=min(num_ids, known.num_ids if known else num_ids))
        seen[kind].append(num_bytes)
    check_all(seen, shapes)
    return theirs


class Stretches(NamedTuple):
    """Bytes that are neighbours on both sides: where they lie, and how many, [N] int64 each."""

    ours: I64
    theirs: I64
    lengths: I64


def _stretches(
    piece: Piece, places: I64, shapes: Mapping[str, KindShape], ours: Addresses, theirs: Addresses
) -> Stretches:
    """Return the stretches of memory of a piece that goes to `places`."""
    bounds = np.array(runs(piece.places, places))
    here, there = piece.places[bounds[:, 0]], places[bounds[:, 0]]
    counts = bounds[:, 1] - bounds[:, 0]
    found: list[tuple[I64, I64, I64]] = []
    for region in range(piece.region, piece.region + piece.num_regions):
        size = shapes[piece.kind].bytes_per_place[region]
        begins = ours[piece.kind][region], theirs[piece.kind][region]
        found.append((begins[0] + here * size, begins[1] + there * size, counts * size))
    return Stretches(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


class WriterByAddress(Writer):
    """A writer over a library to which decode's end is known as `peer`. What it writes cannot be taken back, so it is
    closed when nothing is under way."""

    holds_places = True
    closes_at_once = False
    is_lost = False

    def __init__(
        self,
        library: Any,
        peer: str,
        memory: HostMemory,
        shapes: Mapping[str, KindShape],
        ours: RegionList,
        theirs: RegionList,
    ) -> None:
        self._library, self._peer, self._memory, self._shapes = library, peer, memory, shapes
        self._ours, self._theirs = _addresses(ours), _addresses(theirs)
        self._staging = memory.staging(chunk_bytes(shapes))
        self._chunk: Chunk | None = None

    def begin(self, nonce: bytes, piece: Piece, places: I64) -> None:
        self._chunk = chunk_of(nonce, piece, self._memory.num_bytes(piece), self._memory.sum(piece, self._staging))
        self._write(_stretches(piece, places, self._shapes, self._ours, self._theirs))

    def _write(self, stretches: Stretches) -> None:
        """Begin to."""
        raise NotImplementedError

    def advance(self) -> Chunk | None:
        """Return the chunk when all of it has been written, None before; OSError if it never will be."""
        raise NotImplementedError

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """Data that a writer needs: how the library finds decode's end, and where decode's regions lie."""

    end: bytes
    regions: RegionList


class OneSidedByAddress(OneSided):
    """A transport over a library with one end for all peers; the caches are registered with it as long as it lives.
    `name` is what the library calls this end by. Raises OSError if the library does not start."""

    writer: type[WriterByAddress]
    one_machine = False

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        assert isinstance(endpoint.memory, HostMemory), endpoint.memory
        self._shapes, self._memory = endpoint.shapes, endpoint.memory
        self._regions: RegionList = [(region.kind, region.address, region.num_bytes) for region in endpoint.regions]
        self._library: Any = self._start(name)

    def _start(self, name: str) -> object:
        """Return the library's end, with the regions registered."""
        raise NotImplementedError

    def _end(self) -> bytes:
        """Return the bytes by which a peer finds this end."""
        raise NotImplementedError

    def _meet(self, end: bytes) -> str:
        """Return the library's name for the peer with this end."""
        raise NotImplementedError

    def reach(self, pid: int) -> ReachByAddress:
        return ReachByAddress(msgspec.msgpack.encode(Invitation(self._end(), self._regions)), pid)

    def join(self, address: bytes, page_size: int) -> tuple[WriterByAddress, dict[str, KindShape]]:
        invitation = msgspec.msgpack.decode(address, type=Invitation)
        theirs = shapes_there(invitation.regions, self._shapes, page_size)
        peer = self._meet(invitation.end)
        both = self._regions, invitation.regions
        return self.writer(self._library, peer, self._memory, self._shapes, *both), theirs


class ReachByAddress(Reach):
    """`pid` 0: a process of another machine, whose end cannot be observed here; only its own message counts."""

    def __init__(self, invitation: bytes, pid: int) -> None:
        self._invitation = invitation
        self._process = os.pidfd_open(pid) if pid else -1  # that it was its own still, what it says later proves

    @property
    def invitation(self) -> bytes:
        return self._invitation

    def writer_is_dead(self) -> bool:
        return self._process >= 0 and process_has_ended(self._process)

    def close(self) -> None:
        """Keep the registration, since a writer may still use it."""

    def __del__(self) -> None:
        if self._process >= 0:
            os.close(self._process)


class LibraryTransport(Transport):
    """A transport over a library with which the caches of a host are registered."""

    def unfit(self, endpoint: Endpoint, place: Place | None) -> str:
        on_host = isinstance(endpoint.memory, HostMemory)
        return "" if on_host else "a cache on a GPU cannot be registered in this version: use tcp"


def not_installed(name: str, error: ImportError, packages: str) -> ConfigError:
    """Return the error for a transport whose library cannot be imported; `packages` are those to install."""
    return ConfigError(f"{FLAG} {name}: {error}: use pip to install {packages}, or auto, shm or tcp")


def not_started(name: str, error: OSError) -> ConfigError:
    """Return the error for a transport whose library does not start."""
    return ConfigError(f"{FLAG} {name}: {error}: its own lines above say why; or use auto, shm or tcp")

"""The mover: all that slots of the caches hold, copied within the device, from a tier behind it, and to host memory.

A slot of one kind of cache has the entries of all columns that the layers declare. On the host it is a row of bytes,
in the order of the declarations. Copy-on-write, retracted requests, a sleeping engine, the tiers of the prefix cache,
HiSparse and transfers between engines all copy these columns: none of them has a list of tensors of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from forebay.memory.kv_allocator import KV
from forebay.pools.copy_stream import CopyStream

Places = Mapping[str, Tensor]
"""By kind of cache the slots of its table, int64, in the order of tokens."""

Rows = Mapping[str, Tensor]
"""By kind of cache one row for each slot: uint8 [n, row bytes], on the host."""

Declared = Mapping[str, Mapping[str, Tensor]]
"""By kind of cache the columns of all layers by name, [slots + 1, ...]."""

_LAYOUT_VERSION: Final = 1
_LOADED: Final = 256  # pages that are copied at once


class Region(NamedTuple):
    """The memory of a column: slot i of a kind of cache starts at `address + i * bytes_per_row`."""

    name: str
    kind: str
    address: int
    num_rows: int
    bytes_per_row: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.bytes_per_row


class Mover:
    """Copies slots of the caches of an engine, whose columns are `declared`.

    Of columns of full KV in the host tier (HiSparse), `resident` has the pages on the device. `row_bytes` are the bytes
    of a row by kind. `layout` is a digest of what a row means: rows of one engine are those of another one exactly if
    their layouts are equal.
    """

    def __init__(
        self, declared: Declared, page_size: int, resident: Mapping[str, Tensor], stream: CopyStream | None = None
    ) -> None:
        """`stream` None: the caches are in host memory."""
        self._declared, self._resident, self._stream = declared, resident, stream
        widths = {kind: [_row_bytes(tensor) for tensor in own.values()] for kind, own in declared.items()}
        self.row_bytes = {kind: sum(own) for kind, own in widths.items()}
        # As the widest integers that fit: torch moves single bytes several times slower.
        self._types = {kind: _widest(own) for kind, own in widths.items()}
        self._columns = {
            kind: {name: _as_rows(tensor, self._types[kind]) for name, tensor in own.items()}
            for kind, own in declared.items()
        }
        self.layout = _digest(declared, page_size)

    @property
    def device(self) -> torch.device:
        """The device of the caches."""
        return next(tensor.device for own in self._declared.values() for tensor in own.values())

    def places(self, slots: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, Tensor]:
        """Return slots on the device of the caches."""
        return {kind: torch.from_numpy(ids.copy()).to(self.device) for kind, ids in slots.items()}

    # -- within the device --------------------------------------------------------------------------------------------

    def copy(self, kind: str, source: Tensor, target: Tensor) -> None:
        """Let the slots `target` of a kind hold what the slots `source` held before the call."""
        for column in self._columns[kind].values():
            column.index_copy_(0, target, column.index_select(0, source))

    def load(self, pages: Tensor, slots: Tensor) -> None:
        """Copy pages of the host tier of full KV into resident pages."""
        for name, resident in self._resident.items():
            on_host, on_device = self._columns[KV][name], _as_rows(resident, self._types[KV])
            for some, copies in zip(torch.split(pages, _LOADED), torch.split(slots, _LOADED), strict=True):
                on_device.index_copy_(0, copies, on_host.index_select(0, some))

    # -- host memory --------------------------------------------------------------------------------------------------

    def read(self, places: Places) -> dict[str, Tensor]:
        """Return a copy of these slots, as the device's work so far leaves them, without waiting for it: `copied` tells
        when it is there."""
        return {kind: self._read(kind, at) for kind, at in places.items()}

    def _read(self, kind: str, at: Tensor) -> Tensor:
        rows, begin = at.new_empty((len(at), self.row_bytes[kind]), dtype=torch.uint8), 0
        wide = rows.view(self._types[kind])
        for column in self._columns[kind].values():
            end = begin + column.shape[1]
            wide[:, begin:end] = column.index_select(0, at)
            begin = end
        return rows if self._stream is None else self._stream.to_host(rows)

    def copied(self) -> torch.cuda.Event | None:
        """Return an event behind all that was read so far; None: it is there."""
        return None if self._stream is None else self._stream.behind()

    def written(self) -> torch.cuda.Event | None:
        """Return an event behind all that was written so far; None: it is there."""
        return None if self._stream is None else self._stream.arrived()

    def wait(self) -> None:
        """Wait until all that was read so far is there."""
        if (copied := self.copied()) is not None:
            copied.synchronize()

    def write(self, rows: Rows, places: Places) -> None:
        """Put rows into slots, as many as they were read from. Of some kinds there may be none."""
        for kind, at in places.items():
            if not len(at):  # numpy gives an array without rows no stride
                continue
            source, begin = rows[kind] if self._stream is None else self._stream.to_device(rows[kind]), 0
            assert source.shape == (len(at), self.row_bytes[kind]), f"{source.shape} are no rows of {len(at)} {kind}"
            wide = source.view(self._types[kind])
            for column in self._columns[kind].values():
                end = begin + column.shape[1]
                column.index_copy_(0, at, wide[:, begin:end])
                begin = end

    # -- other engines ------------------------------------------------------------------------------------------------

    def regions(self, kind: str) -> list[Region]:
        """Return the memory of every column of a kind, for transfers."""
        return [
            Region(name, kind, tensor.data_ptr(), len(tensor), _row_bytes(tensor))
            for name, tensor in self._declared[kind].items()
        ]

    def by_place(self, kind: str, bytes_per_place: Sequence[int]) -> list[Tensor]:
        """Return the columns of a kind as bytes of places, as many in a slot as fit: uint8 [places, bytes]."""
        columns = self._declared[kind].values()
        return [tensor.view(torch.uint8).view(-1, size) for tensor, size in zip(columns, bytes_per_place, strict=True)]


def _row_bytes(tensor: Tensor) -> int:
    return tensor.nbytes // len(tensor)


def _as_rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.view(-1).view(dtype).view(len(tensor), -1)


def _widest(num_bytes: Sequence[int]) -> torch.dtype:
    """Return the widest integers of which each of these numbers of bytes is a multiple; single bytes for no number."""
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return widths[math.gcd(8, *num_bytes) if num_bytes else 1]


def checksums(rows: Tensor) -> list[int]:
    """Return the checksum of each row of one kind of cache (XXH3, 64 bits)."""
    return [xxhash.xxh3_64_intdigest(row) for row in rows.numpy()]


def num_bytes(rows: Rows) -> int:
    """Return the bytes of rows of all kinds."""
    return sum(part.nbytes for part in rows.values())


def _digest(declared: Declared, page_size: int) -> str:
    columns = [
        (kind, name, str(tensor.dtype), list(tensor.shape[1:]))
        for kind, own in declared.items()
        for name, tensor in own.items()
    ]
    layout = msgspec.msgpack.encode((_LAYOUT_VERSION, page_size, columns))
    return hashlib.blake2b(layout, digest_size=16).hexdigest()

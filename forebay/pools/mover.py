"""The mover: all that slots of the caches hold, as rows of bytes in host memory.

A row has what one slot of one kind of cache holds: the entries of all columns, in the order in which the layers
declare them. Copies of retracted requests and of a sleeping engine, and the tiers of the prefix cache, are such rows:
none of them has a list of tensors of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.pools.cache_pool import CachePool
from forebay.pools.copy_stream import CopyStream

Places = Mapping[str, Tensor]
"""By kind of cache the slots of its table, int64, in the order of tokens."""

Rows = Mapping[str, Tensor]
"""By kind of cache one row for each slot: uint8 [n, row bytes], on the host."""

_LAYOUT_VERSION: Final = 1


class Mover:
    """Copies rows between the caches of an engine and host memory.

    `row_bytes` are the bytes of a row by kind. `layout` is a digest of what a row means: rows of one engine are those
    of another one exactly if their layouts are equal.
    """

    def __init__(self, cache: CachePool, stream: CopyStream | None = None) -> None:
        """`stream` None: the caches are in host memory."""
        self._stream = stream
        tensors = {kind: [tensor for _, tensor in table.entries] for kind, table in cache.tables.items()}
        widths = {kind: [tensor.nbytes // len(tensor) for tensor in own] for kind, own in tensors.items()}
        self.row_bytes = {kind: sum(own) for kind, own in widths.items()}
        # As the widest integers that fit: torch moves single bytes several times slower.
        self._types = {kind: _widest(own) for kind, own in widths.items()}
        self._columns = {
            kind: [tensor.view(-1).view(self._types[kind]).view(len(tensor), -1) for tensor in own]
            for kind, own in tensors.items()
        }
        self.layout = _digest(cache)

    @classmethod
    def of(cls, cache: CachePool) -> Mover:
        """Return a mover, which copies on a stream of its own on a GPU."""
        devices = {tensor.device for table in cache.tables.values() for _, tensor in table.entries}
        return cls(cache, *(CopyStream(device) for device in devices if device.type == "cuda"))

    @property
    def device(self) -> torch.device:
        """The device of the caches."""
        return next(columns[0].device for columns in self._columns.values() if columns)

    def places(self, slots: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, Tensor]:
        """Return slots on the device of the caches."""
        return {kind: torch.from_numpy(ids.copy()).to(self.device) for kind, ids in slots.items()}

    def read(self, places: Places) -> dict[str, Tensor]:
        """Return a copy of these slots, as the device's work so far leaves them, without waiting for it: `copied` tells
        when it is there."""
        return {kind: self._read(kind, at) for kind, at in places.items()}

    def _read(self, kind: str, at: Tensor) -> Tensor:
        rows, begin = at.new_empty((len(at), self.row_bytes[kind]), dtype=torch.uint8), 0
        wide = rows.view(self._types[kind])
        for column in self._columns[kind]:
            end = begin + column.shape[1]
            wide[:, begin:end] = column.index_select(0, at)
            begin = end
        return rows if self._stream is None else self._stream.to_host(rows)

    def copied(self) -> torch.cuda.Event | None:
        """Return an event behind all that was read so far; None: it is there."""
        return None if self._stream is None else self._stream.behind()

    def wait(self) -> None:
        """Wait until all that was read so far is there."""
        if (copied := self.copied()) is not None:
            copied.synchronize()

    def write(self, rows: Rows, places: Places) -> None:
        """Put rows into slots, as many as they were read from."""
        for kind, at in places.items():
            source, begin = rows[kind] if self._stream is None else self._stream.to_device(rows[kind]), 0
            assert source.shape == (len(at), self.row_bytes[kind]), f"{source.shape} are no rows of {len(at)} {kind}"
            wide = source.view(self._types[kind])
            for column in self._columns[kind]:
                end = begin + column.shape[1]
                column.index_copy_(0, at, wide[:, begin:end])
                begin = end


def _widest(num_bytes: Sequence[int]) -> torch.dtype:
    """Return the widest integers of which each of these numbers of bytes is a multiple; single bytes for no number."""
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return widths[math.gcd(8, *num_bytes) if num_bytes else 1]


def num_bytes(rows: Rows) -> int:
    """Return the bytes of rows of all kinds."""
    return sum(part.nbytes for part in rows.values())


def _digest(cache: CachePool) -> str:
    columns = [
        (kind, name, str(tensor.dtype), list(tensor.shape[1:]))
        for kind, table in cache.tables.items()
        for name, tensor in table.entries
    ]
    layout = msgspec.msgpack.encode((_LAYOUT_VERSION, cache.page_size, columns))
    return hashlib.blake2b(layout, digest_size=16).hexdigest()

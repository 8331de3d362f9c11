"""The mover: all that slots of the caches hold, as rows of bytes in host memory.

A row has what one slot of one kind of cache holds: the entries of all columns, in the order in which the layers
declare them. Copies of retracted requests and of a sleeping engine, and the tiers of the prefix cache, are such rows:
none of them has a list of tensors of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec
import torch
from torch import Tensor

from forebay.pools.cache_pool import CachePool

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

    def __init__(self, cache: CachePool) -> None:
        self._columns = {
            kind: [tensor.view(tensor.shape[0], -1).view(torch.uint8) for _, tensor in table.entries]
            for kind, table in cache.tables.items()
        }
        self.row_bytes = {kind: sum(column.shape[1] for column in own) for kind, own in self._columns.items()}
        self.layout = _digest(cache)

    def read(self, places: Places) -> dict[str, Tensor]:
        """Return a copy of these slots, as the device's work so far leaves them, without waiting for it."""
        return {kind: self._read(kind, at) for kind, at in places.items()}

    def _read(self, kind: str, at: Tensor) -> Tensor:
        rows, begin = at.new_empty((len(at), self.row_bytes[kind]), dtype=torch.uint8), 0
        for column in self._columns[kind]:
            end = begin + column.shape[1]
            if rows.is_cuda:
                rows[:, begin:end] = column.index_select(0, at)
            else:  # twice as fast as torch for single bytes
                rows.numpy()[:, begin:end] = column.numpy()[at.numpy()]
            begin = end
        if not rows.is_cuda:
            return rows
        return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)

    def write(self, rows: Rows, places: Places) -> None:
        """Put rows into slots, as many as they were read from."""
        for kind, at in places.items():
            source, begin = rows[kind].to(at.device, non_blocking=True), 0
            assert source.shape == (len(at), self.row_bytes[kind]), f"{source.shape} are no rows of {len(at)} {kind}"
            for column in self._columns[kind]:
                end = begin + column.shape[1]
                if source.is_cuda:
                    column.index_copy_(0, at, source[:, begin:end])
                else:
                    column.numpy()[at.numpy()] = source.numpy()[:, begin:end]
                begin = end


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

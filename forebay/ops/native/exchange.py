"""The exchange through memory that the ranks' processes share, by compiled kernels."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from ctypes import addressof, c_int
from typing import Final

import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.ops.exchange import READER, Exchange, LostRank, units_of
from forebay.ops.native.kernels import Kernels

BUFFERS: Final = 2  # which exchanges use in turn, see cpu/exchange.cpp
PART_BYTES: Final = 4 << 20  # of a rank in a buffer; a tensor that is larger is exchanged in runs of rows


def shared_bytes(kernels: Kernels, size: int, part_bytes: int = PART_BYTES) -> int:
    """Return the bytes of the memory that `size` ranks share; pages that no exchange needs are not touched."""
    count: int = kernels.bind("fb_exchange_bytes")(size, BUFFERS, part_bytes)
    return count


def mapped(descriptor: int, num_bytes: int) -> Tensor:
    """Return the memory of a file of `num_bytes` that several processes have open, as a tensor that keeps it mapped."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class SharedExchange(Exchange):
    """See `Exchange`. Its kernels are recorded as others are: a step that is replayed has its exchanges within.

    `memory` [bytes] uint8 begins as zeros, is the same of all ranks, and is kept. `processes` are descriptors (pidfd)
    of the other ranks' processes: a rank that waits for one that has ended stops to wait, and `check` raises.
    """

    in_graphs = True

    def __init__(
        self,
        kernels: Kernels,
        memory: Tensor,
        rank: int,
        size: int,
        *,
        processes: Sequence[int] = (),
        part_bytes: int = PART_BYTES,
    ) -> None:
        assert len(memory) >= shared_bytes(kernels, size, part_bytes), (len(memory), size, part_bytes)
        self.rank, self.size = rank, size
        self._pool, self._memory, self._part_bytes = kernels.pool, memory, part_bytes
        self._gather = kernels.bind("fb_exchange_gather")
        self._rows = kernels.bind("fb_exchange_rows")
        self._places = kernels.bind("fb_exchange_places")
        self._spread = kernels.bind("fb_exchange_spread")
        self._lost, self._end = kernels.bind("fb_exchange_lost"), kernels.bind("fb_exchange_end")
        descriptors = (c_int * len(processes))(*processes)
        arguments = memory.data_ptr(), rank, size, BUFFERS, part_bytes, addressof(descriptors), len(processes)
        self._address = kernels.create("fb_exchange", self, *arguments)

    def gather(self, part: Tensor, units: int | None = None) -> Tensor:
        units = units or self.size
        unit = part.shape[1] // len(units_of(self.rank, self.size, units))
        return self._gathered(part, unit, units, unit * units, -1)

    def collect(self, part: Tensor, width: int) -> Tensor:
        return self._gathered(part, part.shape[1], self.size, width, READER)

    def _gathered(self, part: Tensor, unit: int, units: int, width: int, reader: int) -> Tensor:
        rows, size = len(part), part.itemsize
        out = part.new_empty(rows, width)
        self._check_row(-(-units // self.size) * unit * size)
        sizes = part.stride(0) * size, unit * size, units
        self._gather(self._pool, self._address, part.data_ptr(), *sizes, out.data_ptr(), width * size, rows, reader)
        return out

    def places(self, ids: Tensor, per_rank: int) -> Tensor:
        out = torch.empty_like(ids)
        self._places(self._pool, ids.data_ptr(), out.data_ptr(), per_rank, len(ids))
        return out

    def rows(self, part: Tensor, ids: Tensor, per_rank: int) -> Tensor:
        out = torch.empty_like(part)
        row_bytes = part.shape[1] * part.itemsize
        self._check_row(row_bytes)
        addresses = part.data_ptr(), ids.data_ptr(), per_rank, out.data_ptr()
        self._rows(self._pool, self._address, *addresses, row_bytes, len(part))
        return out

    def spread(self, values: Tensor, source: int = READER) -> None:
        self._spread(self._pool, self._address, values.data_ptr(), values.nbytes, source)

    def check(self) -> None:
        if self._lost(self._address):
            raise LostRank(f"rank {self.rank} of {self.size}: another rank has ended, so this step has no result")

    def end(self) -> None:
        self._end(self._address)

    def _check_row(self, row_bytes: int) -> None:
        if row_bytes > self._part_bytes:
            raise ConfigError(
                f"a row of {row_bytes} bytes is exchanged, and {self._part_bytes} are there for a rank: use more ranks"
            )

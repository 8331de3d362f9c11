"""Arrays in a file of weights, which are read when they are asked for.

Every read copies, and checks that the file still has the bytes: a mapped file that another process shortens would end
this process with SIGBUS instead.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.formats.files import open_regular

Array = npt.NDArray[Any]

# Bytes of the rows that `pieces` yields: they stay in the second-level cache until they are converted.
PIECE_BYTES: Final = 1 << 19

# Memory into which a file is read begins where the bytes do, modulo this. Zen 3 copies from the page cache at 1.8 GB/s
# instead of 8 where the target is 8 to 24 bytes above the source, modulo 4,096.
_LINE: Final = 64


class WeightFile:
    """An open file of `num_bytes`, which a read never exceeds."""

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.path, self.num_bytes = path, os.fstat(self._descriptor).st_size
        if not self.num_bytes:
            raise ModelError(f"{path}: cannot be read (it is empty): check that the download completed")

    @property
    def descriptor(self) -> int:
        """Return the open file's descriptor, which is valid as long as this object."""
        return self._descriptor

    def read(self, offset: int, num_bytes: int) -> bytes:
        """At most `num_bytes`, fewer at the end of the file."""
        data = bytearray(max(0, min(num_bytes, self.num_bytes - offset)))
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, data: memoryview) -> None:
        """Fill `data`, which is flat bytes, from `offset` on. Raises ModelError if the file has become too short."""
        done = 0
        while done < len(data):
            try:
                count = os.preadv(self._descriptor, [data[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"{self.path}: cannot be read ({error})") from error
            if not count:
                here = os.fstat(self._descriptor).st_size
                raise ModelError(
                    f"{self.path}: it has {here} bytes and had {self.num_bytes} when it was opened: "
                    "another program has shortened it; try again when it is complete"
                )
            done += count


class FileArray:
    """An array of `shape` in the file, from byte `offset` on. Nothing is read before a method that returns an array is
    called."""

    def __init__(self, file: WeightFile, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> None:
        self._file, self._offset = file, offset
        self.dtype, self.shape = dtype, shape

    @property
    def place(self) -> tuple[WeightFile, int]:
        """Return the file, and the byte of it where the array begins."""
        return self._file, self._offset

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: int) -> FileArray:
        """Return the same bytes with another shape, unread; raise ValueError if the number of elements differs."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"an array of shape {self.shape} cannot be read as {shape}")
        return FileArray(self._file, self.dtype, shape, self._offset)

    def as_bytes(self) -> FileArray:
        """Return the same bytes as such, unread; ValueError if an entry has several."""
        if self.dtype.itemsize != 1:
            raise ValueError(f"entries of {self.dtype.itemsize} bytes cannot be read as bytes")
        return FileArray(self._file, np.dtype(np.uint8), self.shape, self._offset)

    def part(self, first: int, stop: int) -> FileArray:
        """Return these rows, unread."""
        return FileArray(self._file, self.dtype, (stop - first, *self.shape[1:]), self._offset + first * self.row_bytes)

    def read(self) -> Array:
        """Read the array into new memory."""
        memory = np.empty(self.nbytes + _LINE, np.uint8)
        begin = (self._offset - memory.ctypes.data) % _LINE
        begin -= begin % self.dtype.itemsize
        values = memory[begin : begin + self.nbytes]
        if values.size:
            self._file.read_into(self._offset, values.data)
        return values.view(self.dtype).reshape(self.shape)

    def take(self, order: npt.NDArray[np.int64]) -> Array:
        """The rows `order`, which may be in any order."""
        if not len(order):
            return np.empty((0, *self.shape[1:]), self.dtype)
        first, stop = int(order.min()), int(order.max()) + 1
        if stop - first <= 2 * len(order):
            rows = self.part(first, stop).read()
            neighbours = stop - first == len(order) and bool((order[1:] > order[:-1]).all())
            return rows if neighbours else rows[order - first]
        runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        return np.concatenate([self.part(int(run[0]), int(run[-1]) + 1).read() for run in runs])

    def pieces(self) -> Iterator[Array]:
        """Yield the rows in order, some at a time."""
        step = max(1, PIECE_BYTES // max(1, self.row_bytes))
        for first in range(0, len(self), step):
            yield self.part(first, min(first + step, len(self))).read()

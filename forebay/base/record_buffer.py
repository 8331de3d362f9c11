"""A buffer of records in shared memory: one process writes, and another one reads it after the writer was killed.

The memory begins with a header, `_HEADER`: capacity of the buffer, bytes written so far, and the position of the oldest
record that is whole, both counted from the first byte that was ever written. Behind it is room for one record that is
never overwritten, then the buffer. A record is its length in four bytes and its content.
"""

from __future__ import annotations

import mmap
import os
import struct
from io import FileIO
from typing import Final, NamedTuple, Self

FIRST_BYTES: Final = 1 << 16  # for the record that stays
LEAST_BYTES: Final = 1 << 16  # of a buffer
_HEADER: Final = struct.Struct("<QQQ")
_LENGTH: Final = struct.Struct("<I")
_WRITTEN: Final = 1  # the entry of the header
_pack_length: Final = _LENGTH.pack  # of each record: a step makes three
_FIRST_AT: Final = 64
_START: Final = _FIRST_AT + FIRST_BYTES


class Content(NamedTuple):
    """The content of a buffer: the record that stays (b"" for none), the others, oldest first, and the bytes of those
    that were overwritten."""

    first: bytes
    records: list[bytes]
    num_lost_bytes: int


class RecordBuffer:
    """A buffer in a mapping. The writer is one thread of one process; any process may take a `content` meanwhile."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._capacity = len(memory) - _START
        self._header = memoryview(memory)[: _HEADER.size].cast("Q")  # an entry is written at once
        _, self._written, self._oldest = self._header

    @classmethod
    def of(cls, fd: int, num_bytes: int) -> Self:
        """Give the memory of a descriptor the size of a buffer of `num_bytes`, and map it. The caller closes `fd`."""
        os.ftruncate(fd, _START + num_bytes)
        buffer = cls(mmap.mmap(fd, _START + num_bytes))
        _HEADER.pack_into(buffer._memory, 0, num_bytes, 0, 0)
        return buffer

    @classmethod
    def existing(cls, fd: int) -> Self | None:
        """Map the buffer of a descriptor; None if it has none."""
        size = os.fstat(fd).st_size
        return cls(mmap.mmap(fd, size)) if size else None

    @property
    def num_bytes(self) -> int:
        """The room for records that are overwritten."""
        return self._capacity

    def keep(self, record: bytes) -> None:
        """Write the record that is never overwritten. Raises ValueError if it is longer than `FIRST_BYTES`."""
        if len(record) + _LENGTH.size > FIRST_BYTES:
            raise ValueError(f"a first record of {len(record)} bytes; there is room for {FIRST_BYTES - _LENGTH.size}")
        self._memory[_FIRST_AT + _LENGTH.size : _FIRST_AT + _LENGTH.size + len(record)] = record
        _LENGTH.pack_into(self._memory, _FIRST_AT, len(record))

    def append(self, record: bytes, before: bytes | None = None) -> None:
        """Write a record over the oldest ones, with another one `before` it at once. Raises ValueError for records that
        are longer than the buffer."""
        data = _pack_length(len(record)) + record
        if before is not None:
            data = _pack_length(len(before)) + before + data
        size, capacity, memory = len(data), self._capacity, self._memory
        end = self._written + size
        if end - self._oldest > capacity:
            if size > capacity:
                raise ValueError(f"a record of {size - _LENGTH.size} bytes in a buffer of {capacity}")
            self._overwrite(end - capacity)
        at = self._written % capacity + _START
        if at + size <= len(memory):
            memory[at : at + size] = data
        else:
            self._put(at - _START, data)
        self._written = self._header[_WRITTEN] = end

    def _put(self, at: int, data: bytes) -> None:
        """Write what goes beyond the end of the buffer at its beginning."""
        here = self._capacity - at
        self._memory[_START + at : _START + self._capacity] = data[:here]
        self._memory[_START : _START + len(data) - here] = data[here:]

    def _overwrite(self, least: int) -> None:
        """Give up the records that begin before `least`. A reader learns of it before their bytes change."""
        while self._oldest < least:
            at, end = _START + self._oldest % self._capacity, _START + self._capacity
            size = self._memory[at : min(at + _LENGTH.size, end)]
            size += self._memory[_START : _START + _LENGTH.size - len(size)]
            self._oldest += _LENGTH.size + _LENGTH.unpack(size)[0]
        _HEADER.pack_into(self._memory, 0, self._capacity, self._written, self._oldest)

    def content(self) -> Content:
        """Return what the buffer holds, also while a writer goes on: the records that it overwrites meanwhile are left
        out."""
        _, written, _ = _HEADER.unpack_from(self._memory)
        memory = self._memory[:]
        _, _, oldest = _HEADER.unpack_from(self._memory)
        at, buffer = oldest % self._capacity, memory[_START:]
        content = (buffer[at:] + buffer[:at])[: max(0, written - oldest)]
        records, at = [], 0
        while at < len(content):
            (length,) = _LENGTH.unpack_from(content, at)
            records.append(content[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
        (size,) = _LENGTH.unpack_from(memory, _FIRST_AT)
        return Content(memory[_FIRST_AT + _LENGTH.size :][:size], records, oldest)


def shared_memory(name: str) -> FileIO | None:
    """Return new memory without a file, to be inherited by a child; None on systems without such. The caller closes
    it."""
    return FileIO(os.memfd_create(name, os.MFD_CLOEXEC), "r+") if hasattr(os, "memfd_create") else None

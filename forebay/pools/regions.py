"""The one owner of memory that is given back while the engine lives: caches, packed weights, what graphs compute in.

Every region has a tag, an address that never changes, and a size. Its pages can be returned to the system and are zeros
when they are next touched; views of them and graphs recorded over them stay valid.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

Take = Callable[[int], Tensor]
"""So many bytes, zeros: [bytes] uint8, at the beginning of a page."""

_LINUX: Final = sys.platform == "linux"


class Tag(StrEnum):
    """What is released together, as the field calls it."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True, slots=True)
class _Mapped:
    address: int
    num_bytes: int
    memory: mmap.mmap
    offset: int  # in its tag's file


class Regions:
    """Hands out memory by tag, on one device. What has a tag in `shared` lies in one file without a name per tag, which
    another process can map (`place`); on a CPU under Linux only, OSError elsewhere."""

    def __init__(self, device: torch.device | str = "cpu", *, shared: Collection[Tag] = ()) -> None:
        self._device = torch.device(device)
        self._mapped: dict[Tag, list[_Mapped]] = {tag: [] for tag in Tag}
        self._files = {tag: os.memfd_create(f"forebay-{tag}", os.MFD_CLOEXEC) for tag in shared}
        self._file_bytes = dict.fromkeys(shared, 0)

    def __del__(self) -> None:
        for fd in self._files.values():
            os.close(fd)

    def take(self, tag: Tag, num_bytes: int, *, large_pages: bool = False) -> Tensor:
        """So many bytes, zeros, [num_bytes] uint8, at the beginning of a page. On a CPU the system provides them page
        by page when they are first written.

        torch writes them all at once: 4 GiB then take ten seconds of start-up and are resident from the beginning.
        Without `large_pages` the system is told to use none: a step would wait for 2 MiB of zeros in each layer
        wherever it is the first to write (a 40-token prompt on scattered pages took 650 ms of CPU time instead of 38,
        and decoding gained nothing).
        """
        if num_bytes == 0 or self._device.type != "cpu" or not _LINUX:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        offset = self._file_bytes.get(tag, 0)
        if tag in self._files:
            end = offset + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._files[tag], end)
            self._file_bytes[tag] = end
            memory = mmap.mmap(self._files[tag], num_bytes, flags=mmap.MAP_SHARED, offset=offset)
        else:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel that was built without large pages does not know the words
            memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
        taken = torch.frombuffer(memory, dtype=torch.uint8)
        self._mapped[tag].append(_Mapped(taken.data_ptr(), num_bytes, memory, offset))
        return taken

    def num_bytes(self, tag: Tag) -> int:
        """Handed out so far."""
        return sum(region.num_bytes for region in self._mapped[tag])

    def place(self, address: int) -> tuple[int, int]:
        """The file descriptor, which stays ours, and the offset in it at which another process finds this address.
        KeyError for one that is in no region of a shared tag."""
        for tag, fd in self._files.items():
            for region in self._mapped[tag]:
                if 0 <= address - region.address < region.num_bytes:
                    return fd, region.offset + address - region.address
        raise KeyError(f"{address:#x} is in no region that is shared: {[*map(str, self._files)]} are")

    def why_kept(self, tag: Tag) -> str | None:
        """Why memory of this tag cannot be given back; None where it can."""
        if self._device.type != "cpu":
            return (
                f"it is {self._device.type} memory, which this version takes from torch and gives back with the process"
            )
        return None if _LINUX else f"{sys.platform} has no way to return pages and keep their addresses"

    def release(self, tag: Tag) -> None:
        """Return the pages of all regions of this tag; of shared ones for the other processes, too. Whatever is written
        there afterwards takes pages again."""
        for region in self._mapped[tag]:
            region.memory.madvise(mmap.MADV_REMOVE if tag in self._files else mmap.MADV_DONTNEED)

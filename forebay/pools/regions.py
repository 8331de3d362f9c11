"""The one owner of memory that is given back while the engine lives: caches, packed weights, what graphs compute in.

Every region has a tag, an address that never changes, and a size. Its pages can be returned to the system and are zeros
when they are next touched; views of them and graphs recorded over them stay valid. On a GPU a `Saver` does that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import torch
from torch import Tensor

from forebay.base.units import ceil_div
from forebay.pools.cuda_range import take_range
from forebay.pools.cuda_shared import take_shared
from forebay.pools.host_file import map_over

Take = Callable[[int], Tensor]
"""So many bytes, zeros: [bytes] uint8, at the beginning of a page."""

_LINUX: Final = sys.platform == "linux"
_MADV_POPULATE_READ: Final = 22  # of Linux's mman.h; not in the standard library
_POPULATED_BYTES: Final = 64 << 20  # between two reports of progress


class Tag(StrEnum):
    """A group of memory that is released together, under the field's name."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


class Saver(Protocol):
    """GPU memory whose pages go and come back while its addresses stay: what torch-memory-saver is, a pool per tag."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]:
        """Give this tag to all that torch allocates inside the block."""
        ...

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None:
        """Map the memory again, with any content if there is no copy."""
        ...


@dataclass(frozen=True, slots=True)
class _Mapped:
    address: int
    num_bytes: int
    memory: mmap.mmap
    offset: int  # in its tag's file


@dataclass(frozen=True, slots=True)
class _OnGpu:
    """A region of a GPU with a file of its own."""

    address: int
    num_bytes: int
    fd: int


class Regions:
    """Allocates memory by tag, on one device. Regions with a tag in `shared` are in files that another process can map
    (`place`): on a CPU under Linux one without a name for each tag, OSError elsewhere; on a GPU one for each region. On
    a GPU no memory is released without a `saver`; of tags that are `backed_up` it keeps copies meanwhile."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        shared: Collection[Tag] = (),
        saver: Saver | None = None,
        backed_up: Collection[Tag] = (),
    ) -> None:
        self.device = torch.device(device)
        self._saver, self.backed_up = saver, frozenset(backed_up if saver else ())
        self._saved: dict[Tag, list[Tensor]] = {tag: [] for tag in Tag}
        self._paused = {Tag.CUDA_GRAPH}  # which has no pool
        self._mapped: dict[Tag, list[_Mapped]] = {tag: [] for tag in Tag}
        self._shared_on_gpu: frozenset[Tag] = frozenset(shared if self.device.type != "cpu" else ())
        self._on_gpu: list[_OnGpu] = []
        self._files = {tag: _file(tag) for tag in shared if tag not in self._shared_on_gpu}
        self._file_bytes = dict.fromkeys(self._files, 0)

    def __del__(self) -> None:
        for fd in (*self._files.values(), *(region.fd for region in self._on_gpu)):
            os.close(fd)

    def take(self, tag: Tag, num_bytes: int, *, large_pages: bool = False) -> Tensor:
        """Return `num_bytes` zeros, [num_bytes] uint8, at the beginning of a page. On a CPU the system provides them
        page by page when they are first written.

        torch writes them all at once: 4 GiB then take ten seconds of start-up and are resident from the beginning.
        Without `large_pages` the system is advised to use none. A step would wait for 2 MiB of zeros in each layer at
        its first write to them. A 40-token prompt on scattered pages took 650 ms of CPU time instead of 38, and
        decoding gained nothing.
        """
        if num_bytes and tag in self._shared_on_gpu:
            taken, fd = take_shared(num_bytes, self.device)
            self._on_gpu.append(_OnGpu(taken.data_ptr(), num_bytes, fd))
            return taken
        if num_bytes == 0 or self.device.type != "cpu" or not _LINUX:
            with self.inside(tag):
                taken = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            self._saved[tag] += [taken] if self._saver else []
            return taken
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

    def take_tiers(self, tag: Tag, on_device: int, on_host: int, *, folder: str = "") -> Tensor:
        """Return the bytes of a device tier and, behind them, those of a host tier, as `take` does. The first number is
        a multiple of a page. With a `folder` the host tier is a file there, which has no name and whose blocks are
        allocated at once. Such a file keeps its bytes when the tag is released.
        On a GPU both are one range of its addresses, and no memory is released.
        ConfigError if the folder has no room, or if the GPU's driver maps no memory of the host."""
        if self.device.type != "cpu":
            return take_range(on_device, on_host, self.device)
        if not folder:
            return self.take(tag, on_device + on_host)
        memory = self.take(tag, on_device + ceil_div(on_host, mmap.PAGESIZE) * mmap.PAGESIZE)
        map_over(memory[on_device:], folder)
        return memory[: on_device + on_host]

    def take_file(self, tag: Tag, descriptor: int, num_bytes: int, progress: Callable[[int, int], None]) -> Tensor:
        """Map a file of the caller's, of which nothing is copied before it is written to: processes that map it share
        one copy. Written pages stay private, and are lost with `release`, after which the file's bytes are there again.

        `progress` is called with the bytes that are in memory and in total. OSError if the file cannot be mapped. It
        must not become shorter meanwhile.
        """
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for first in range(0, num_bytes, _POPULATED_BYTES):
            size = min(_POPULATED_BYTES, num_bytes - first)
            with suppress(OSError):  # before Linux 5.14 pages come when they are first read
                memory.madvise(_MADV_POPULATE_READ, first, size)
            progress(first + size, num_bytes)
        taken = torch.frombuffer(memory, dtype=torch.uint8)
        self._mapped[tag].append(_Mapped(taken.data_ptr(), num_bytes, memory, 0))
        return taken

    def drop_file(self, tag: Tag, taken: Tensor) -> None:
        """Forget what `take_file` returned; its memory ends with the last view of it."""
        self._mapped[tag] = [region for region in self._mapped[tag] if region.address != taken.data_ptr()]

    def inside(self, tag: Tag) -> AbstractContextManager[None]:
        """Give this tag to all that torch allocates on a GPU meanwhile; nothing else should be allocated."""
        return self._saver.region(tag, enable_cpu_backup=tag in self.backed_up) if self._saver else nullcontext()

    def num_bytes(self, tag: Tag) -> int:
        """Handed out so far."""
        return sum(region.num_bytes for region in self._mapped[tag]) + sum(taken.nbytes for taken in self._saved[tag])

    def place(self, address: int) -> tuple[int, int]:
        """The file descriptor, which stays ours, and the offset in it at which another process finds this address.
        KeyError for one that is in no region of a shared tag."""
        for tag, fd in self._files.items():
            for region in self._mapped[tag]:
                if 0 <= address - region.address < region.num_bytes:
                    return fd, region.offset + address - region.address
        for own in self._on_gpu:
            if 0 <= address - own.address < own.num_bytes:
                return own.fd, address - own.address
        shared = [*map(str, (*self._files, *self._shared_on_gpu))]
        raise KeyError(f"{address:#x} is in no region that is shared: {shared} are")

    def why_kept(self, tag: Tag) -> str | None:
        """Return why memory of this tag cannot be released; None if it can."""
        if self.device.type != "cpu":
            return self._why_kept_on_gpu(tag)
        return None if _LINUX else f"{sys.platform} has no way to return pages and keep their addresses"

    def _why_kept_on_gpu(self, tag: Tag) -> str | None:
        """Graphs are dropped and captured again: their memory is torch's."""
        if tag is Tag.CUDA_GRAPH:
            return None
        if self._saver is None:
            return (
                f"{self.device.type} memory comes back at its addresses through torch-memory-saver alone: install "
                "forebay[cuda] and start with --enable-memory-saver"
            )
        if tag is Tag.WEIGHTS and tag not in self.backed_up:
            return "weights on a GPU come back from a copy in host memory alone: start with --weights-cpu-backup"
        return None

    def resume(self, tag: Tag) -> None:
        """Map the memory again. After `release` it holds zeros, or the copy if one was kept."""
        if self._saver and tag in self._paused - {Tag.CUDA_GRAPH}:
            self._saver.resume(tag)
            self._paused.remove(tag)
        for taken in self._saved[tag] if tag not in self.backed_up else ():
            taken.zero_()
        self._return_pages(tag)

    def release(self, tag: Tag) -> None:
        """Return the pages of all regions of this tag; of shared ones for the other processes, too. Later writes
        allocate pages again, on a CPU; a GPU must not touch them before `resume`."""
        if self._saver and tag not in self._paused:
            self._saver.pause(tag)
            self._paused.add(tag)
        self._return_pages(tag)

    def _return_pages(self, tag: Tag) -> None:
        for region in self._mapped[tag]:
            region.memory.madvise(mmap.MADV_REMOVE if tag in self._files else mmap.MADV_DONTNEED)


def _file(tag: Tag) -> int:
    """Make a file without a name that can grow but not shrink: a process that maps it never meets a missing page."""
    fd = os.memfd_create(f"forebay-{tag}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd

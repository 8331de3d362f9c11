"""The C library's share of memory that was freed, and a reserve for when there is no more."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Callable, Iterator
from typing import Final

RESERVE_BYTES: Final = 4 << 20
# Of a RuntimeError: torch's allocators for the CPU and for a GPU, CUDA itself and through Triton, cuBLAS and cuDNN.
_NO_MEMORY: Final = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")

_trim: Callable[[int], int] | None = None  # elsewhere than on glibc
with contextlib.suppress(OSError, AttributeError):
    _trim = ctypes.CDLL(None).malloc_trim  # looked up once: what requests bring makes us load nothing


def give_back_freed_memory() -> None:
    """Return every whole free page to the system; without glibc, do nothing. Takes milliseconds, and a later allocation
    of the same size is mapped anew."""
    if _trim is not None:
        _trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: of Python, the system (mmap), torch or a GPU's libraries."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError)


class Reserve:
    """Address space set aside for the recovery from MemoryError, which itself needs objects, arrays and log lines."""

    def __init__(self, num_bytes: int = RESERVE_BYTES) -> None:
        self._num_bytes = num_bytes
        self._memory: mmap.mmap | None = None
        self._take()

    @property
    def is_there(self) -> bool:
        return self._memory is not None

    def _take(self) -> None:
        with contextlib.suppress(OSError, MemoryError):  # at the next time, then
            self._memory = mmap.mmap(-1, self._num_bytes)

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Inside, the memory is free for others. It is set aside again afterwards, if there is as much."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        try:
            yield
        finally:
            self._take()

"""A file as memory: the host tier of HiSparse on a CPU whose memory is too small for it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from typing import Final

from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.units import human_bytes

_MAP_FIXED: Final = 0x10  # of Linux's mman.h; not in the standard library
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def map_over(memory: Tensor, folder: str) -> None:
    """Let the bytes of `memory`, whole pages of an anonymous mapping, be those of a file in `folder`.

    The file has no name, so it ends with the mapping, and all of its blocks are allocated here: a write never finds the
    disk full. Raises ConfigError if the folder is missing or has no room.
    """
    try:
        _map_over(memory, folder)
    except OSError as error:
        option = f"--hisparse-host-path {folder}"
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise ConfigError(f"{option}: {error.strerror}: name a folder that can be written to") from error
        disk = os.statvfs(folder)
        needed, free = human_bytes(memory.nbytes), human_bytes(disk.f_bavail * disk.f_frsize)
        why = f"the KV of a layer takes {needed} more and {free} are free"
        raise ConfigError(f"{option}: {why}: free some, or lower --kv-cache-bytes or --max-total-tokens") from error


def _map_over(memory: Tensor, folder: str) -> None:
    descriptor = _nameless(folder)
    try:
        os.posix_fallocate(descriptor, 0, memory.nbytes)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(memory.data_ptr(), memory.nbytes, access, flags, descriptor, 0) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    finally:
        os.close(descriptor)


def _nameless(folder: str) -> int:
    """Open a file without a name."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, path = tempfile.mkstemp(prefix="forebay-kv-", dir=folder)  # a file system without nameless files
    os.unlink(path)
    return descriptor

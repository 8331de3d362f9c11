"""A driver of a GPU that is not there: its memory lies in files of the host, which another process can map, too."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from forebay.pools import cuda_shared
from forebay.pools.cuda_range import DeviceBytes

PIECE: Final = 64 << 10
_FIXED: Final = 0x10  # MAP_FIXED of mman.h
_INVALID: Final = 1  # CUDA_ERROR_INVALID_VALUE
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p


class FileDriver:
    """`fails` is the name of a function that returns an error. `mapped` are the bytes at each address, `open` the
    handles that were not released."""

    def __init__(self, fails: str = "", error: int = 801, capable: int = 1) -> None:
        self._fails, self._error, self._capable = fails, error, capable
        self.open: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.reserved: set[int] = set()

    def cuDeviceGetAttribute(self, value: Any, which: Any, device: Any) -> int:
        assert (which.value, device.value) == (103, 0)
        value._obj.value = self._capable
        return self._error if self._fails == "attribute" else 0

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        made = properties._obj
        assert (made.type, made.handle_types, made.location.type, option) == (1, 1, 1, 0)
        size._obj.value = PIECE
        return 0

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        if self._fails == "create":
            return self._error
        assert size.value % PIECE == 0
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, size.value)
        self.open.add(fd)
        handle._obj.value = fd
        return 0

    def cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: Any, flags: Any) -> int:
        assert kind.value == 1
        if self._fails == "export":
            return self._error
        fd._obj.value = os.dup(handle.value)
        return 0

    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: Any) -> int:
        assert kind.value == 1
        try:
            handle._obj.value = os.dup(fd.value)
        except OSError:
            return _INVALID
        self.open.add(handle._obj.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.open.remove(handle.value)
        os.close(handle.value)
        return 0

    def cuMemAddressReserve(self, base: Any, size: Any, alignment: Any, at: Any, flags: Any) -> int:
        base._obj.value = self._mmap(0, size.value, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.reserved.add(base._obj.value)
        return 0

    def cuMemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        if self._fails == "map" or size.value > os.fstat(handle.value).st_size:
            return self._error if self._fails else _INVALID
        self._mmap(at.value, size.value, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, handle.value)
        self.mapped[at.value] = size.value
        return 0

    def cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> int:
        wanted = access._obj
        assert (wanted.flags, wanted.location.type, count.value, self.mapped[at.value]) == (3, 1, 1, size.value)
        return self._error if self._fails == "access" else 0

    def cuMemUnmap(self, at: Any, size: Any) -> int:
        return 0 if self.mapped.pop(at.value, None) == size.value else _INVALID

    def cuMemAddressFree(self, at: Any, size: Any) -> int:
        self.reserved.remove(at.value)
        _LIBC.munmap(ctypes.c_void_p(at.value), ctypes.c_size_t(size.value))
        return 0

    def _mmap(self, at: int, size: int, protection: int, flags: int, fd: int) -> int:
        address = _LIBC.mmap(ctypes.c_void_p(at), ctypes.c_size_t(size), protection, flags, fd, ctypes.c_long(0))
        assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        return int(address)


def tensor_of(memory: DeviceBytes, device: torch.device) -> Tensor:
    """As the package's own, of memory that a CPU reads."""
    view = (ctypes.c_ubyte * memory.num_bytes).from_address(memory.address)
    view.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(view, dtype=torch.uint8)


def install(monkeypatch: pytest.MonkeyPatch, driver: FileDriver) -> None:
    """Let a GPU's memory be this driver's, and its tensors a CPU's."""
    monkeypatch.setattr(cuda_shared, "_started", lambda: driver)
    monkeypatch.setattr(cuda_shared, "tensor_of", tensor_of)

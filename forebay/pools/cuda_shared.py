"""Memory of a GPU that another process of the machine maps, by a file descriptor of CUDA's driver (CUDA IPC).

The memory lives until the last process has unmapped it or ended, as a file does: a peer that dies takes no memory from
under a copy. See "Virtual Memory Management" of CUDA's programming guide.
"""

from __future__ import annotations

import weakref
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Final

import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div, human_bytes
from forebay.pools.cuda_range import (
    NO_MEMORY,
    ON_DEVICE,
    PINNED,
    READ_WRITE,
    Access,
    DeviceBytes,
    Driver,
    Location,
    Properties,
    granularity,
    library,
    tensor_of,
)

# Of cuda.h.
_FILE: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_MAKES_FILES: Final = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED

_MOST_BYTES: Final = 1 << 44  # more than a GPU has: a peer names the number
_FLAG: Final = "--disaggregation-transfer-backend"


def shares_memory(device: torch.device, driver: Driver | None = None) -> bool:
    """Return whether the driver makes files of this GPU's memory."""
    value = c_int()
    cuda = driver or _started()
    error = cuda.cuDeviceGetAttribute(byref(value), c_int(_MAKES_FILES), c_int(device.index or 0))
    return not error and value.value == 1


def take_shared(num_bytes: int, device: torch.device, driver: Driver | None = None) -> tuple[Tensor, int]:
    """Return zeros on the device, [num_bytes] uint8, and the descriptor of their file, which is the caller's. The
    memory stays until the process ends. Raises MemoryError if the GPU has too little, and ConfigError if its driver
    refuses.
    """
    cuda, handle, fd = driver or _started(), c_uint64(), c_int(-1)
    properties, size = _file_properties(cuda, num_bytes, device)
    error = cuda.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_uint64(0))
    if error == NO_MEMORY:
        raise MemoryError(f"out of memory: {human_bytes(size)} of KV on the GPU")
    _check(error)
    _check(cuda.cuMemExportToShareableHandle(byref(fd), handle, c_int(_FILE), c_uint64(0)))
    address = _map(cuda, handle, size, properties.location)
    return tensor_of(DeviceBytes(address, num_bytes), device).zero_(), fd.value


def map_shared(fd: int, num_bytes: int, device: torch.device, driver: Driver | None = None) -> Tensor:
    """Map the first `num_bytes` of a file that `take_shared` has made, which stays the caller's: [num_bytes] uint8.

    They are unmapped with the last view of the tensor: no kernel may still use it then. Raises OSError if the file is
    none, has fewer bytes, or is of a GPU that this one cannot reach.
    """
    if num_bytes > _MOST_BYTES:
        raise OSError(f"a file of a GPU's memory is said to have {num_bytes} bytes")
    cuda, handle = driver or _started(), c_uint64()
    try:
        properties, size = _file_properties(cuda, num_bytes, device)
        _check(cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), c_int(_FILE)))
        try:
            address = _map(cuda, handle, size, properties.location)
        finally:
            cuda.cuMemRelease(handle)  # the mapping keeps the memory
    except ConfigError as error:
        raise OSError(error.message) from error
    memory = DeviceBytes(address, num_bytes)
    weakref.finalize(memory, _unmap, cuda, address, size).atexit = False  # the driver does it
    return tensor_of(memory, device)


def _started() -> Driver:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return library(_FLAG)


def _file_properties(cuda: Driver, num_bytes: int, device: torch.device) -> tuple[Properties, int]:
    """Return what to ask of the driver for memory with a file, and the bytes in whole pieces."""
    properties = Properties(type=PINNED, handle_types=_FILE, location=Location(ON_DEVICE, device.index or 0))
    error, piece = granularity(cuda, properties)
    _check(error)
    return properties, ceil_div(num_bytes, piece) * piece


def _map(cuda: Driver, handle: c_uint64, size: int, gpu: Location) -> int:
    """Map memory for this GPU to read and write; return its address."""
    base, count = c_uint64(), c_size_t(size)
    _check(cuda.cuMemAddressReserve(byref(base), count, c_size_t(0), c_uint64(0), c_uint64(0)))
    try:
        _check(cuda.cuMemMap(base, count, c_size_t(0), handle, c_uint64(0)))
        _check(cuda.cuMemSetAccess(base, count, byref(Access(gpu, READ_WRITE)), c_size_t(1)))
    except ConfigError:
        _unmap(cuda, base.value, size)
        raise
    return base.value


def _unmap(cuda: Driver, address: int, size: int) -> None:
    """Unmap what is mapped of a range, and give the range back."""
    cuda.cuMemUnmap(c_uint64(address), c_size_t(size))
    cuda.cuMemAddressFree(c_uint64(address), c_size_t(size))


def _check(error: int) -> None:
    if error:
        raise ConfigError(
            f"{_FLAG}: the NVIDIA driver shares no memory of the GPU between processes (CUDA error {error}): use tcp"
        )

"""One range of addresses on a GPU, of which the first part is the GPU's memory and the rest the host's.

Kernels read both by address, and the host's part is never swapped. CUDA's driver makes such ranges: see "Virtual Memory
Management" of its programming guide. Memory of the host in them needs CUDA 12.2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.base.units import ceil_div, human_bytes

# Of cuda.h.
PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_ON_HOST: Final = 3  # CU_MEM_LOCATION_TYPE_HOST_NUMA
READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM: Final = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
NO_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Location(Structure):
    """CUmemLocation: a GPU, or a NUMA node of the host."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _Flags(Structure):
    _fields_ = [
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    ]


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class Driver(Protocol):
    """The functions of libcuda that map memory. Each returns 0, or an error's number."""

    cuMemGetAllocationGranularity: Callable[..., int]
    cuMemAddressReserve: Callable[..., int]
    cuMemCreate: Callable[..., int]
    cuMemMap: Callable[..., int]
    cuMemSetAccess: Callable[..., int]
    cuMemUnmap: Callable[..., int]
    cuMemAddressFree: Callable[..., int]
    cuMemRelease: Callable[..., int]
    cuMemExportToShareableHandle: Callable[..., int]
    cuMemImportFromShareableHandle: Callable[..., int]
    cuDeviceGetAttribute: Callable[..., int]


class _Part(NamedTuple):
    location: Location
    num_bytes: int


def map_range(on_device: int, on_host: int, *, gpu: int = 0, driver: Driver | None = None) -> tuple[int, int]:
    """Map `on_device` bytes of the GPU and behind them `on_host` bytes of the host; return the address and the bytes.

    Memory comes in pieces of some MiB: the one in which the host's part begins is the GPU's. The range stays until the
    process ends. Raises MemoryError if either memory is too small, and ConfigError if the driver cannot map a range.
    """
    cuda = driver or library("--enable-hisparse")
    device, host = Location(ON_DEVICE, gpu), Location(_ON_HOST, 0)
    piece = max(_piece_of(cuda, device), _piece_of(cuda, host))
    first = ceil_div(on_device, piece) * piece
    parts = [_Part(device, first), _Part(host, ceil_div(max(0, on_device + on_host - first), piece) * piece)]
    total, base = sum(part.num_bytes for part in parts), c_uint64()
    _check(cuda.cuMemAddressReserve(byref(base), c_size_t(total), c_size_t(piece), c_uint64(0), c_uint64(0)), parts)
    at = base.value
    for part in parts:
        if part.num_bytes:
            handle, properties = c_uint64(), Properties(type=PINNED, location=part.location)
            size = c_size_t(part.num_bytes)
            _check(cuda.cuMemCreate(byref(handle), size, byref(properties), c_uint64(0)), parts)
            _check(cuda.cuMemMap(c_uint64(at), size, c_size_t(0), handle, c_uint64(0)), parts)
            readers = [device] if part.location is device else [device, host]
            access = (Access * len(readers))(*(Access(reader, READ_WRITE) for reader in readers))
            _check(cuda.cuMemSetAccess(c_uint64(at), size, access, c_size_t(len(readers))), parts)
            at += part.num_bytes
    return base.value, total


def take_range(on_device: int, on_host: int, device: torch.device) -> Tensor:
    """Return a range as zeros on the device: [on_device + on_host] uint8."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    address, _ = map_range(on_device, on_host, gpu=device.index or 0)
    return tensor_of(DeviceBytes(address, on_device + on_host), device).zero_()


def tensor_of(memory: DeviceBytes, device: torch.device) -> Tensor:
    """Return the bytes as a tensor, which keeps `memory` alive: [bytes] uint8."""
    taken: Tensor = torch.as_tensor(memory, device=device)
    return taken


class DeviceBytes:
    """Memory of a GPU as torch takes it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes
        data = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__: dict[str, Any] = data


def granularity(cuda: Driver, properties: Properties) -> tuple[int, int]:
    """Return the driver's error, and of how many bytes memory with these properties is a multiple."""
    size = c_size_t()
    error = cuda.cuMemGetAllocationGranularity(byref(size), byref(properties), _MINIMUM)
    return error, size.value


def _piece_of(cuda: Driver, location: Location) -> int:
    error, size = granularity(cuda, Properties(type=PINNED, location=location))
    _check(error, [])
    return size


def _check(error: int, parts: list[_Part]) -> None:
    if not error:
        return
    if error == NO_MEMORY and parts:
        on_device, on_host = (human_bytes(part.num_bytes) for part in parts)
        raise MemoryError(f"out of memory: {on_device} on the GPU and {on_host} of the host in one range of KV")
    raise ConfigError(
        f"--enable-hisparse: the NVIDIA driver maps no memory of the host beside the GPU's (CUDA error {error}), which "
        "needs CUDA 12.2 and Linux: update the driver or leave it out"
    )


def library(flag: str) -> Driver:
    """Return the NVIDIA driver's library. If there is none, raises ConfigError with the `flag` that needs it."""
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"{flag}: the NVIDIA driver's library cannot be loaded ({error})") from None
    for name in Driver.__annotations__:
        getattr(cuda, name).restype = c_int
    found: Driver = cuda
    return found

"""The NVIDIA GPU of this machine, asked through its driver's management library: no torch, no context on the GPU."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Final

_LIBRARY: Final = "libnvidia-ml.so.1"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_GB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """In bytes: the whole memory of the first GPU, and the free part. `count`: the GPUs that this process may use."""

    total: int
    free: int
    count: int = 1


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t of nvml.h."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def visible_gpu(index: int) -> str:
    """Return a value of CUDA_VISIBLE_DEVICES for the GPU that is number `index` of this process's."""
    names = os.environ.get(_VISIBLE)
    return str(index) if names is None else names.split(",")[index].strip()


def gpu_memory() -> GpuMemory | None:
    """Return the memory of the GPU that this process would use, the first in CUDA_VISIBLE_DEVICES; None without one."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    nvml.nvmlDeviceGetHandleByIndex_v2.argtypes = [c_uint, POINTER(c_void_p)]
    nvml.nvmlDeviceGetHandleByUUID.argtypes = [c_char_p, POINTER(c_void_p)]
    nvml.nvmlDeviceGetMemoryInfo.argtypes = [c_void_p, POINTER(_MemoryInfo)]
    if nvml.nvmlInit_v2() != 0:
        return None
    handle, info = c_void_p(), _MemoryInfo()
    try:
        first = visible_gpu(0)
        if first.isdigit():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(first), byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(first.encode(), byref(handle))
        if failed or nvml.nvmlDeviceGetMemoryInfo(handle, byref(info)):
            return None
        return GpuMemory(int(info.total), int(info.free), _count(nvml))
    finally:
        nvml.nvmlShutdown()


def _count(nvml: ctypes.CDLL) -> int:
    if (names := os.environ.get(_VISIBLE)) is not None:
        return len(names.split(","))
    count = c_uint(1)
    return int(count.value) if nvml.nvmlDeviceGetCount_v2(byref(count)) == 0 else 1


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """How many requests a GPU decodes together, which is also the largest captured batch, and the tokens of a prompt
    that a step takes."""

    max_running_requests: int
    chunked_prefill_size: int


# (less than so many GB, limits), as the field has them: a graph's memory and a chunk's activations grow with both.
_BY_MEMORY: Final = (
    (20, GpuLimits(8, 2048)),
    (60, GpuLimits(32, 4096)),
    (160, GpuLimits(256, 8192)),
)
_LARGEST: Final = GpuLimits(512, 16384)


def limits_for(total_bytes: int) -> GpuLimits:
    """Return the defaults for a GPU with this memory."""
    return next((limits for gb, limits in _BY_MEMORY if total_bytes < gb * _GB), _LARGEST)

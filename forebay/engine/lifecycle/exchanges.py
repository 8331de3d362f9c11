"""The exchange of an engine's ranks: the file through which their processes meet, and each rank's end of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.config.engine_config import EngineConfig, RankExchange
from forebay.ops import Ops
from forebay.ops.exchange import Exchange, GatheredExchange
from forebay.ops.groups import join_group
from forebay.ops.native.exchange import SharedExchange, mapped, shared_bytes
from forebay.ops.native.kernels import Kernels
from forebay.ops.native.ops import NativeOps
from forebay.pools.cuda_shared import map_shared, take_shared


def make_exchange_file(config: EngineConfig, ops: Ops) -> int:
    """Return the descriptor of a new file for the exchanges of all ranks, which is the caller's: memory of the host or
    of rank 0's GPU, or an empty file through which a process group meets. Raises ConfigError if the GPU's driver makes
    no file."""
    if config.ranks.exchange is RankExchange.IPC and config.device != "cpu":
        try:
            _, file = take_shared(_memory_bytes(config), torch.device(config.device))
        except ConfigError as error:
            raise _not_shared(config) from error
        torch.cuda.synchronize()  # it is zeros before another rank counts in it
        return file
    file = os.memfd_create("forebay-exchange")
    if config.ranks.exchange is RankExchange.SHM:
        os.ftruncate(file, shared_bytes(_kernels_of(ops), config.ranks.size))
    elif config.ranks.exchange is RankExchange.IPC:
        os.ftruncate(file, _memory_bytes(config))
    return file


def make_exchange(config: EngineConfig, ops: Ops, rank: int, file: int, others: Sequence[int]) -> Exchange:
    """Return a rank's exchange. `file` is that of `make_exchange_file`, and stays open as long. `others` are
    descriptors of the other ranks' processes. Raises ConfigError if this rank's GPU cannot map the file."""
    size, device = config.ranks.size, torch.device(config.device)
    match config.ranks.exchange:
        case RankExchange.SHM:
            kernels = _kernels_of(ops)
            return SharedExchange(kernels, mapped(file, shared_bytes(kernels, size)), rank, size, processes=others)
        case RankExchange.IPC:
            from forebay.ops.triton.exchange import MemoryTransport  # Triton is there if its kernels compute

            return GatheredExchange(MemoryTransport(_memory_of(config, file, device), rank, size))
        case _:
            return GatheredExchange(join_group(file, rank, size, device))


def _memory_bytes(config: EngineConfig) -> int:
    from forebay.ops.triton.exchange import shared_bytes as bytes_on_gpu

    return bytes_on_gpu(config.ranks.size)


def _memory_of(config: EngineConfig, file: int, device: torch.device) -> Tensor:
    num_bytes = _memory_bytes(config)
    if device.type == "cpu":  # in Triton's interpreter
        return mapped(file, num_bytes)
    try:
        return map_shared(file, num_bytes, device)
    except OSError as error:
        raise _not_shared(config) from error


def _not_shared(config: EngineConfig) -> ConfigError:
    return ConfigError(
        f"--tp-exchange ipc: the NVIDIA driver shares no memory of a GPU among the processes of {config.ranks.size} "
        "ranks: use --tp-exchange nccl with a GPU for each rank, or --tp-size 1"
    )


def _kernels_of(ops: Ops) -> Kernels:
    assert isinstance(ops, NativeOps), f"ranks exchange through shared memory with native kernels, not {ops.name}"
    return ops.kernels

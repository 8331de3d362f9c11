"""The exchange through a process group of torch.distributed: gloo on a CPU, the reference, and NCCL on GPUs."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from forebay.base.errors import ConfigError
from forebay.ops.exchange import Transport

_LOOPBACK = "127.0.0.1"


class GroupTransport(Transport):
    """Gathers through a process group. NCCL's work is of the current stream, and is captured with it; gloo's is not."""

    def __init__(self, group: Any, *, in_graphs: bool) -> None:
        self._group, self.in_graphs = group, in_graphs
        self.rank, self.size = int(group.rank()), int(group.size())

    def gathered(self, part: Tensor) -> Tensor:
        out = part.new_empty(self.size, *part.shape)
        if part.numel():
            self._group._allgather_base(_bytes(out), _bytes(part)).wait()
        return out


def join_group(file: int, rank: int, size: int, device: torch.device) -> GroupTransport:
    """Join the process group of the ranks, who meet through a `file` that all have open and that begins empty.

    The backend is NCCL on a GPU, of which each rank has one of its own, and else gloo, on the loopback interface. The
    descriptor stays open as long as the group. Raises ConfigError if torch was built without NCCL.
    """
    dist: Any = importlib.import_module("torch.distributed")  # whose types do not name these classes
    store = dist.FileStore(f"/proc/self/fd/{file}", size)
    if device.type == "cpu":
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        return GroupTransport(gloo(store, rank, size, options), in_graphs=False)
    if not dist.is_nccl_available():
        raise ConfigError("--tp-exchange nccl: this torch was built without NCCL: install its build for CUDA")
    return GroupTransport(dist.ProcessGroupNCCL(store, rank, size), in_graphs=True)


def _bytes(values: Tensor) -> Tensor:
    """Return the bytes of contiguous values: as such every dtype can be sent, and no bit changes."""
    return values.view(-1).view(torch.uint8)

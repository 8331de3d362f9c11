"""Ranks as threads: the same function in each, with an exchange of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from forebay.ops.exchange import Exchange, GatheredExchange
from forebay.ops.groups import GroupTransport
from forebay.ops.native.exchange import PART_BYTES, SharedExchange, shared_bytes
from forebay.ops.native.kernels import Kernels

Result = TypeVar("Result")
dist: Any = importlib.import_module("torch.distributed")  # whose types do not name these classes


def shared_exchanges(kernels: Sequence[Kernels], part_bytes: int = PART_BYTES) -> list[SharedExchange]:
    """One exchange for each of the kernels, over the same new memory."""
    size = len(kernels)
    memory = torch.zeros(shared_bytes(kernels[0], size, part_bytes), dtype=torch.uint8)
    return [SharedExchange(each, memory, rank, size, part_bytes=part_bytes) for rank, each in enumerate(kernels)]


def group_exchanges(size: int) -> list[GatheredExchange]:
    """Exchanges through gloo, within this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as ranks:
        groups = list(ranks.map(lambda rank: dist.ProcessGroupGloo(store, rank, size), range(size)))
    return [GatheredExchange(GroupTransport(group, in_graphs=False)) for group in groups]


def on_each(exchanges: Sequence[Exchange], step: Callable[[Exchange], Result]) -> list[Result]:
    """Run the step on all ranks at once, and return their results; an error of a rank ends the waits of the others."""

    def run(exchange: Exchange) -> Result:
        try:
            return step(exchange)
        except BaseException:
            exchange.end()
            raise

    with torch.inference_mode(False), ThreadPoolExecutor(len(exchanges)) as ranks:
        return list(ranks.map(run, exchanges))

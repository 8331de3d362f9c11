"""The copies in host memory of what retracted requests had on the device (C26)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from forebay.pools.cache_pool import CachePool
from forebay.requests.step_plan import StepPlan

Places = Mapping[str, Tensor]
"""Where a request's part of the caches lies: by kind of cache the rows of its table, int64, in the order of tokens."""


class NoHostCopy(Exception):
    """A plan loads a copy that was never saved, or was dropped."""


class HostCopies:
    """By request. A copy is there from the step that saves it to the one that loads or drops it."""

    def __init__(self, cache: CachePool) -> None:
        self._cache = cache
        self._copies: dict[int, tuple[Tensor, ...]] = {}

    def check(self, plan: StepPlan) -> None:
        """Raise NoHostCopy for a load of nothing."""
        there = (self._copies.keys() | {copy.request_id for copy in plan.host.saves}) - set(plan.host.drops)
        missing = sorted({copy.request_id for copy in plan.host.loads} - there)
        if missing:
            raise NoHostCopy(f"requests {missing} have no copy on the host; requests {sorted(there)} have")

    def save(self, request_id: int, places: Places) -> None:
        self._copies[request_id] = get_cpu_copy(self._cache, places)

    def drop(self, request_id: int) -> None:
        """Drop a copy. Without one, do nothing: the step that was to save it may have failed."""
        self._copies.pop(request_id, None)

    def load(self, request_id: int, places: Places) -> None:
        """Bring the copy back; it is gone then."""
        load_cpu_copy(self._cache, self._copies.pop(request_id), places)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for copy in self._copies.values() for part in copy)


def get_cpu_copy(cache: CachePool, places: Places) -> tuple[Tensor, ...]:
    """Return a host copy of these places of every column, as the device's work so far leaves them, without waiting for
    it."""
    return tuple(_to_host(tensor.index_select(0, at)) for tensor, at in _parts(cache, places))


def load_cpu_copy(cache: CachePool, copy: tuple[Tensor, ...], places: Places) -> None:
    """Put a copy into other places, as many as it was taken from."""
    for source, (tensor, at) in zip(copy, _parts(cache, places), strict=True):
        tensor.index_copy_(0, at, source.to(tensor.device, non_blocking=True))


def _parts(cache: CachePool, places: Places) -> Iterator[tuple[Tensor, Tensor]]:
    return ((tensor, at) for kind, at in places.items() for tensor in cache.tables[kind].tensors)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor

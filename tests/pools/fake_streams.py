"""Streams and events of a GPU that is not there: which accesses to memory nothing orders.

Each op of torch runs at once, on a CPU, and counts as queued on the stream that is current. An access races if another
stream, or the host, has the same memory in use and no event, wait or launch comes between (vector clocks).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forebay.ops import uploads
from forebay.pools import copy_stream
from tests.torch_modes import DispatchMode

HOST = "host"
Clock = dict[str, int]


class Race(AssertionError):
    """Two accesses that nothing orders, or memory that is given back while a stream has it in use."""


class FakeEvent:
    def __init__(self, gpu: FakeGpu, clock: Clock) -> None:
        self._gpu, self._clock = gpu, dict(clock)
        self.synchronized = False

    @property
    def clock(self) -> Clock:
        return self._clock

    def query(self) -> bool:
        """A GPU is late: nothing is through until the host waits for it."""
        return self.synchronized

    def synchronize(self) -> None:
        self.synchronized = True
        self._gpu.join(HOST, self._clock)


class FakeStream:
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self._gpu, self.name = gpu, name

    def record_event(self) -> FakeEvent:
        self._gpu.tick(self.name)
        return FakeEvent(self._gpu, self._gpu.clocks[self.name])

    def wait_event(self, event: FakeEvent) -> None:
        self._gpu.join(self.name, event.clock)


class FakeGpu(DispatchMode):
    """While it is open, ops are accesses of the current stream, or of the host if all their memory is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {}
        self.current = FakeStream(self, "steps")
        self._num_streams = 0
        self._last: dict[int, dict[tuple[str, bool], int]] = {}  # of a storage by stream and whether it wrote: when
        self._owner: dict[int, str] = {}
        self._users: dict[int, set[str]] = {}
        self._recorded: dict[int, set[str]] = {}
        self._pinned: set[int] = set()
        self._on_host: set[int] = set()
        self._storages: dict[int, torch.UntypedStorage] = {}  # by key, kept so that no other gets its address

    def stream(self) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self, f"stream {self._num_streams}")

    @contextmanager
    def within(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def tick(self, name: str) -> int:
        clock = self.clocks.setdefault(name, {})
        clock[name] = clock.get(name, 0) + 1
        return clock[name]

    def join(self, name: str, other: Clock) -> None:
        clock = self.clocks.setdefault(name, {})
        for each, at in other.items():
            clock[each] = max(clock.get(each, 0), at)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        self._pinned.add(self._key(made))
        return self.on_host(made)

    def on_host(self, tensor: Tensor) -> Tensor:
        self._on_host.add(self._key(tensor))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._pinned

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self._recorded.setdefault(self._key(tensor), set()).add(stream.name)

    def access(self, name: str, tensor: Tensor, *, writes: bool) -> None:
        key, clock = self._key(tensor), self.clocks.setdefault(name, {})
        for (other, wrote), at in self._last.setdefault(key, {}).items():
            if (writes or wrote) and clock.get(other, 0) < at:
                raise Race(f"{name} and {other} have the same memory in use, {tuple(tensor.shape)}")
        self._last[key][name, writes] = clock.get(name, 0)
        self._users.setdefault(key, set()).add(name)

    def check_lifetimes(self) -> None:
        """Raise Race for memory of one stream that another one uses without its allocator knowing."""
        for key, owner in self._owner.items():
            others = self._users.get(key, set()) - {owner, HOST} - self._recorded.get(key, set())
            if others and key not in self._on_host:
                raise Race(f"memory of {owner} is in use by {sorted(others)} when it is given back")

    def _key(self, tensor: Tensor) -> int:
        """Return what identifies the memory of a tensor for as long as this is open."""
        storage = tensor.untyped_storage()
        address: int = storage._cdata
        self._storages.setdefault(address, storage)
        return address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        keys = {self._key(tensor) for tensor in given}
        new = [tensor for tensor in made if self._key(tensor) not in keys]
        for tensor in new:
            self._owner[self._key(tensor)] = self.current.name
        written = [arg for arg, named in zip(args, func._schema.arguments, strict=False) if _writes(named)]
        if not func.is_view and given:
            on_host = all(self._key(tensor) in self._on_host for tensor in given)
            name = HOST if on_host else self.current.name
            self.join(name, self.clocks.setdefault(HOST, {}))  # it is queued behind what the host has seen
            self.tick(name)
            for tensor in given:
                self.access(name, tensor, writes=any(tensor is each for each in written))
            for tensor in new:
                self.access(name, tensor, writes=True)
        return result


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Put a GPU's streams in place of torch's. All memory is a GPU's, but what is pinned or NumPy's."""
    gpu, numpy, from_numpy = FakeGpu(), torch.Tensor.numpy, torch.from_numpy

    def read_by_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        gpu.tick(HOST)
        gpu.access(HOST, tensor, writes=False)
        return numpy(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: gpu.stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", gpu.within)
    for module in (copy_stream, uploads):
        monkeypatch.setattr(module, "pinned", gpu.pinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: gpu.is_pinned(tensor))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: gpu.record_stream(tensor, stream))
    monkeypatch.setattr(torch.Tensor, "numpy", read_by_host)
    monkeypatch.setattr(torch, "from_numpy", lambda array: gpu.on_host(from_numpy(array)))
    with gpu:
        yield gpu

"""Records the work of a step on the CPU: native kernels in recordings, torch's own work as calls in between.

While a step is recorded its native kernels go into a `Recording` and are not run, so that a capture takes no longer
than the step's Python. They are run only when torch is about to read their results. Torch's work passes through a
dispatch mode. It allocates from an arena: a replay then finds its memory at the addresses of the recording, and memory
is used again within the step as soon as no reference to it is left. Views only name addresses, and cost nothing in a
replay.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.ops.native import recording as native
from forebay.ops.native.kernels import Kernels
from forebay.ops.native.recording import Recording
from forebay.pools.regions import Take

Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])  # named tuples

_ALIGN: Final = 64  # bytes: a cache line, and what the tile loads want
_BLOCK_BYTES: Final = 1 << 22  # the arena grows by at least so much

_aten = torch.ops.aten
_EMPTY: Final = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
# What looks at values without being tagged so. `tolist` and `numpy` are seen by what they resolve first.
_READ: Final = (
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.resolve_conj.default,
    _aten.resolve_neg.default,
    _aten.repeat_interleave.Tensor,
    _aten.repeat_interleave.self_Tensor,
)
_READS_VALUES: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Uncapturable(Exception):
    """The step looks at a value on the host: a replay could not follow it."""


class Arena:
    """Memory for what a step computes, in blocks that `take` makes and that are never given back. Owned by one backend.

    A tensor's bytes are free again when the last view of them dies: so a recording uses as much memory as the step did,
    and graphs recorded one after the other share the same bytes.
    """

    def __init__(self, take: Take) -> None:
        self._take_block = take
        self._free: list[tuple[int, int, int]] = []  # (block, offset, size), in order
        self._blocks: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    @property
    def num_bytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        size = max(_ALIGN, -(-num_bytes // _ALIGN) * _ALIGN)
        block, offset = self._take(size)
        # torch keeps this array until no tensor uses its memory any more.
        array = self._blocks[block][offset : offset + size]
        weakref.finalize(array, self._release, block, offset, size).atexit = False
        return torch.from_numpy(array)[:num_bytes].view(dtype).view(shape)

    def unowned(self, tensor: Tensor) -> Tensor:
        """Return the bytes under a tensor that does not keep them from being used again; `tensor` itself if they are
        not of this arena."""
        for block in self._blocks:
            offset = tensor.data_ptr() - block.ctypes.data
            if 0 <= offset < len(block):
                num_bytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
                flat = torch.from_numpy(block[offset : offset + num_bytes]).view(tensor.dtype)
                return flat.as_strided(tensor.shape, tensor.stride())
        return tensor

    def _take(self, size: int) -> tuple[int, int]:
        """The smallest gap that is large enough."""
        best = min((gap for gap in self._free if gap[2] >= size), key=lambda gap: gap[2], default=None)
        if best is None:
            best = self._grow(size)
        self._free.remove(best)
        block, offset, length = best
        if length > size:
            self._free.append((block, offset + size, length - size))
            self._free.sort()
        return block, offset

    def _grow(self, size: int) -> tuple[int, int, int]:
        length = max(size, _BLOCK_BYTES)
        self._blocks.append(self._take_block(length).numpy())
        gap = (len(self._blocks) - 1, 0, length)
        self._free.append(gap)
        return gap

    def _release(self, block: int, offset: int, size: int) -> None:
        merged: list[tuple[int, int, int]] = []
        for gap in sorted([*self._free, (block, offset, size)]):
            if merged and merged[-1][0] == gap[0] and merged[-1][1] + merged[-1][2] == gap[1]:
                merged[-1] = (gap[0], merged[-1][1], merged[-1][2] + gap[2])
            else:
                merged.append(gap)
        self._free[:] = merged


class RecordedGraph(Generic[Outputs]):
    """Recordings, and the torch calls between them: called, it does the step again."""

    def __init__(self, parts: list[Recording | Callable[[], None]], outputs: Outputs, kept: list[Tensor]) -> None:
        self._outputs = outputs
        self.num_kernels = sum(len(part) for part in parts if isinstance(part, Recording))
        self.num_torch_ops = sum(not isinstance(part, Recording) for part in parts)
        self._kept = kept
        self._calls = [part.replay if isinstance(part, Recording) else part for part in parts]

    def __call__(self) -> Outputs:
        for call in self._calls:
            call()
        return self._outputs


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which one step is recorded."""

    def __init__(self, kernels: Kernels, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels, self._arena = kernels, arena
        self._parts: list[Recording | Callable[[], None]] = []
        self._to_run: list[Recording] = []
        self._kept: list[Tensor] = []
        self._recording = ExitStack()

    def __enter__(self) -> Self:
        self._begin_recording()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._recording.close()

    def finish(self, outputs: Outputs) -> RecordedGraph[Outputs]:
        """Return the graph. Its outputs are valid until the next graph is captured or replayed: they share its
        memory."""
        parts = [part for part in self._parts if not isinstance(part, Recording) or len(part)]
        return RecordedGraph(parts, type(outputs)(*map(self._arena.unowned, outputs)), self._kept)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep its compiler from looking in here torch would import it, a second that every start would wait."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTY and _plain(kwargs):
            like = func(*args, **{**kwargs, "device": "meta"})
            return self._arena.empty(tuple(like.shape), like.dtype)
        if func in _READ or any(tag in func.tags for tag in _READS_VALUES):
            raise Uncapturable(f"{func} reads a value on the host")
        if self._by_kernel(func, args):
            return args[0]
        if not func.is_view:
            self._catch_up()
        results = func(*args, **kwargs)
        if func._schema.is_mutable or not _is_view(results, args):
            again = self._between_recordings(func, args, kwargs, results)
            if func.is_view:  # by its schema; `reshape` and its like copy where they must, and this copied too early
                self._catch_up()
                again()
        return results

    def _catch_up(self) -> None:
        """Run the recorded calls that have not run yet: torch is about to read or write values."""
        self._recording.close()
        for recording in self._to_run:
            recording.replay()
        self._to_run.clear()
        self._begin_recording()

    def _by_kernel(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Record an operation that only moves bytes, so that it does not leave the recording."""
        if func in (_aten.fill_.Scalar, _aten.zero_.default):
            return native.fill(self._kernels, args[0], args[1] if len(args) > 1 else 0)
        if func is _aten.copy_.default:
            return native.copy(self._kernels, args[0], args[1])
        return False

    def _between_recordings(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> Callable[[], None]:
        outputs = _tensors(results)
        self._kept += outputs
        in_place = func._schema.is_mutable

        def again() -> None:
            computed = func(*args, **kwargs)
            if not in_place:
                for old, new in zip(outputs, _tensors(computed), strict=True):
                    old.copy_(new)

        self._recording.close()
        self._parts.append(again)
        self._begin_recording()
        return again

    def _begin_recording(self) -> None:
        recording = Recording(self._kernels)
        self._recording.enter_context(recording.record())
        self._parts.append(recording)
        self._to_run.append(recording)


def _plain(kwargs: dict[str, Any]) -> bool:
    """Whether the arena can serve this allocation: dense, on the CPU, and nothing else asked for."""
    device = kwargs.get("device")
    return (device is None or torch.device(device).type == "cpu") and kwargs.get("memory_format") in (
        None,
        torch.contiguous_format,
    )


def _is_view(results: Any, args: tuple[Any, ...]) -> bool:
    """By address and not by schema: `reshape` and similar calls copy if they must."""
    outputs = _tensors(results)
    sources = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and arg.numel()}
    return bool(outputs) and all(
        output.numel() == 0 or output.untyped_storage().data_ptr() in sources for output in outputs
    )


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [result for result in results if isinstance(result, Tensor)] if isinstance(results, list | tuple) else []

"""CUDA graphs without a GPU: a step does nothing that a capture forbids, and in a replay what it did in the capture.

A replay runs the step's Python again and compares it, call by call, with the capture: the ops of torch with shapes and
numbers, and the kernels of Triton with grids, numbers and constants. On a GPU these are part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from forebay.ops.triton.launch import Kernel
from forebay.runtime.graphs.backends import CudaGraphs
from forebay.runtime.graphs.recorder import _READ, _READS_VALUES
from tests.torch_modes import DispatchMode

Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])
# Tensors of Python's numbers are copied to the GPU from memory that is not pinned, which no capture takes.
_COPIES_FROM_HOST = (torch.ops.aten.lift_fresh.default,)


class Calls(DispatchMode):
    """Records what a step does. Kernels of Triton are seen while `Calls` is open, those of the interpreter included."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[object] = []

    def __enter__(self) -> Calls:
        self._own = Kernel.__getitem__
        calls, own = self, self._own

        def launched(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **options: Any) -> Any:
                calls.made.append((kernel.jit.fn.__name__, grid, _plain(args), _plain(options)))
                with _disable_current_modes():
                    return own(kernel, grid)(*args, **options)

            return launch

        Kernel.__getitem__ = launched  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        Kernel.__getitem__ = self._own  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func, args):
            raise RuntimeError(f"{func} reads a value on the host, which no capture takes")
        if func in _COPIES_FROM_HOST:
            raise RuntimeError(f"{func} copies from the host's memory, which no capture takes")
        self.made.append((str(func), _plain(args), _plain(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Any) -> bool:
    """Return whether a function reads values on the host: of an index by places none, of one by a mask their number."""
    if func is torch.ops.aten.index.Tensor:
        return any(at is not None and at.dtype in (torch.bool, torch.uint8) for at in args[1])
    return func in _READ or any(tag in func.tags for tag in _READS_VALUES)


def _plain(value: Any) -> Any:
    """Shapes in place of tensors."""
    return str(tree_map(lambda leaf: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf, value))


class FakeCudaGraphs(CudaGraphs):
    """Outputs of all graphs lie in the same memory: a capture or a replay overwrites those of the others."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []

    def capture(self, step: Callable[[], Outputs]) -> Callable[[], Outputs]:
        for _ in range(self._WARM_UPS):
            step()
        with Calls() as captured:
            outputs = step()
        kept = type(outputs)(*(output.clone() for output in outputs))
        self._outputs += kept

        def replay() -> Outputs:
            with Calls() as calls:
                again = step()
            assert calls.made == captured.made, "a replay would do what was captured, and the step does something else"
            for output in self._outputs:
                _poison(output)
            for output, values in zip(kept, again, strict=True):
                output.copy_(values)
            return kept

        return replay


def _poison(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

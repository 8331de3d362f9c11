"""Finds every place where the host waits for the device: what would be a copy back, were the tensors on a GPU (C11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.torch_modes import DispatchMode

METHODS = ("tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__len_hint__")
FUNCTIONS = {getattr(Tensor, name) for name in METHODS if hasattr(Tensor, name)}
SYNCHRONOUS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
}
INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


class _Functions(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS:
            self.found.append(func.__name__)
            with torch._C.DisableTorchFunction(), _quiet():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Dispatches(DispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func is torch.ops.aten._to_copy.default and str(kwargs.get("device", "")) == "cpu"
        by_mask = func in INDEXED and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (func in SYNCHRONOUS or to_host or by_mask) and not _quiet_depth:
            self.found.append(str(func))
        return func(*args, **kwargs)


_quiet_depth: list[None] = []


@contextmanager
def _quiet() -> Iterator[None]:
    """Within one counted read-back: what it is made of is not counted again."""
    _quiet_depth.append(None)
    try:
        yield
    finally:
        _quiet_depth.pop()


@contextmanager
def readbacks() -> Iterator[list[str]]:
    """The names of the read-backs that happen inside, in order."""
    found: list[str] = []
    with _Functions(found), _Dispatches(found):
        yield found

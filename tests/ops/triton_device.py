"""Where Triton's kernels are tested: on the GPU of this machine, or without one through Triton's interpreter.

Whoever imports this is skipped where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.ops.reference.adapters import AdapterTable
from forebay.ops.reference.attention import PagedKv
from forebay.ops.reference.recurrence import StateBatch
from forebay.ops.reference.tiers import TierStep
from tests.conftest import HAS_GPU
from tests.ops import helpers

pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")
from forebay.ops.triton import TritonOps, attention, experts
from forebay.ops.triton import streams as streams_of_a_gpu
from forebay.ops.triton.choices import ALL_ROWS, Choice, Choices
from tests.ops.interpreter import speed_up

if not HAS_GPU:
    speed_up()

__all__ = [
    "ALL_ROWS",
    "HAS_GPU",
    "INTERPRETER_ALONE",
    "ON_EACH_DEVICE",
    "Choice",
    "Choices",
    "OnDevice",
    "TritonOps",
    "assert_close",
    "attention",
    "experts",
    "streams_of_a_gpu",
]

INTERPRETER_ALONE = pytest.mark.skipif(HAS_GPU, reason="kernels are compiled for the GPU")
# One test body for both; `pytest -m gpu` on a machine with a GPU runs them all there.
ON_EACH_DEVICE = [
    pytest.param("cpu", id="interpreter", marks=INTERPRETER_ALONE),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def assert_close(actual: Tensor, expected: Tensor, *, state_dtype: torch.dtype = torch.float32) -> None:
    """As the helpers' own; but the interpreter cuts float32 off where bfloat16 ends instead of rounding."""
    if not HAS_GPU and torch.bfloat16 in (expected.dtype, state_dtype):
        torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)
    else:
        helpers.assert_close(actual, expected, state_dtype=state_dtype)


class OnDevice:
    """Ops whose arguments come from the CPU and whose results go back there, as do tensors that an op writes."""

    def __init__(self, ops: Any, device: str) -> None:
        """`ops` are those of a backend, or a group of them."""
        self._ops, self._device = ops, device

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if self._device == "cpu" or isinstance(op, str):
            return op
        if not callable(op):
            return OnDevice(op, self._device)

        def call(*args: Any, **kwargs: Any) -> Any:
            there: dict[tuple[int, int], Tensor] = {}
            sent = _map(args, lambda tensor: self._send(tensor, there))
            sent_by_name = _map(kwargs, lambda tensor: self._send(tensor, there))
            result = op(*sent, **sent_by_name)
            for tensor in _tensors((args, kwargs)):
                tensor.copy_(self._send(tensor, there))
            return _map(result, Tensor.cpu)

        return call

    def _send(self, tensor: Tensor, there: dict[tuple[int, int], Tensor]) -> Tensor:
        """The same view of the same storage on the device, which is copied once however many views it has."""
        storage = tensor.untyped_storage()
        if tensor.is_cuda or not storage.nbytes():  # all tensors without memory have the same address
            return tensor.to(self._device)
        key = (storage.data_ptr(), tensor.itemsize)
        if key not in there:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            there[key] = whole.to(self._device)
        return there[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        parts = [_map(part, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: _map(part, function) for name, part in value.items()}
    if isinstance(value, StateBatch | PagedKv | AdapterTable | TierStep):
        named = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **_map(named, function))
    return value


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))

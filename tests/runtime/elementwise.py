"""Functions of torch's CPU with the same bits wherever an element lies, as a GPU's have.

On a CPU the elements at the end of a tensor are computed one by one, by another function than those before them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tests.torch_modes import DispatchMode

_ATEN: Final = torch.ops.aten
_FUNCTIONS: Final = (
    *(_ATEN.exp, _ATEN.sigmoid, _ATEN.tanh, _ATEN.softplus, _ATEN.silu, _ATEN.gelu, _ATEN.log, _ATEN.log1p, _ATEN.pow),
    *(_ATEN.rsqrt, _ATEN.sqrt, _ATEN.cos, _ATEN.sin, _ATEN.erf, _ATEN.expm1),
)


class SameEverywhere(DispatchMode):
    """Computes such functions of float32 in float64, and rounds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func.overloadpacket not in _FUNCTIONS or not isinstance(first, Tensor) or first.dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        return func(first.double(), *args[1:], **(kwargs or {})).float()

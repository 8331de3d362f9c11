"""The definition in torch of the ops in elementwise.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchElementwise:
    """See `ElementwiseOps`."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="none" if exact else "tanh") * up).to(x.dtype)

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * gate * (alpha * gate).sigmoid()).to(x.dtype)

    def relu2(self, x: Tensor) -> Tensor:
        return x.float().relu().square().to(x.dtype)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def mul_silu(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * F.silu(gate.float())).to(x.dtype)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        opened = gate.float().sigmoid().repeat_interleave(x.shape[1] // gate.shape[1], dim=1)
        return (x.float() * opened).to(x.dtype)

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def zeros_like(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

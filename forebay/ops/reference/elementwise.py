"""The ops that work entry by entry, or move entries: each one's contract for every backend, and its definition in
torch.

Computed in float32, rounded once. Inputs may be views into wider rows; results are contiguous.

Shape letters: T tokens, H hidden size, I intermediate size, G gates per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class ElementwiseOps:
    """Activations, sums, products and copies of entries, defined in torch. Results have the dtype of the input."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2I] -> silu(x[:, :I]) * x[:, I:], [T, I]."""
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x [T, 2I] -> gelu(x[:, :I]) * x[:, I:], [T, I]; gelu in its tanh form, or with `exact` by the error function
        (arXiv 1606.08415, section 2)."""
        gate, up = x.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="none" if exact else "tanh") * up).to(x.dtype)

    def sparse_gelu_and_mul(self, x: Tensor, *, deviations: float) -> Tensor:
        """x [T, 2I] -> gelu(max(gate - cut, 0)) * up, [T, I], of gate x[:, :I] and up x[:, I:]; gelu in its tanh form.
        cut is the row's mean of the gate plus so many standard deviations (Gemma 3n, as transformers has it)."""
        gate, up = x.float().chunk(2, dim=-1)
        above = gate - gate.mean(dim=-1, keepdim=True)
        cut = deviations * above.square().mean(dim=-1, keepdim=True).sqrt()
        return (F.gelu((above - cut).relu(), approximate="tanh") * up).to(x.dtype)

    def clamped_swiglu(self, x: Tensor, *, alpha: float, limit: float, offset: float = 1.0) -> Tensor:
        """x [T, 2I] -> [T, I], of gate x[:, :I] and up x[:, I:]: with gate cut at `limit` and up at +-`limit`,
        (up + offset) * gate * sigmoid(alpha * gate). gpt-oss, and with offset 0 DeepSeek-V4, as in transformers'
        reference."""
        gate, up = x.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + offset) * gate * (alpha * gate).sigmoid()).to(x.dtype)

    def relu2(self, x: Tensor) -> Tensor:
        """max(x, 0)^2, [T, I] -> [T, I]."""
        return x.float().relu().square().to(x.dtype)

    def xielu(self, x: Tensor, *, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
        """beta x + alpha_p x^2 for x > 0, else beta x + alpha_n (exp(min(x, eps)) - 1 - x), [T, I] -> [T, I]; arXiv
        2411.13010, with eps as in transformers."""
        values = x.float()
        below = alpha_n * (torch.expm1(values.clamp(max=eps)) - values)
        return (beta * values + torch.where(values > 0, alpha_p * values * values, below)).to(x.dtype)

    def gelu(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """gelu(x) in its tanh form, or with `exact` by the error function, [T, I] -> [T, I]."""
        return F.gelu(x.float().contiguous(), approximate="none" if exact else "tanh").to(x.dtype)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """x * y, [T, I] each -> [T, I]."""
        return x * y

    def mul_silu(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * silu(gate), [T, I] each -> [T, I]."""
        return (x.float() * F.silu(gate.float())).to(x.dtype)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, I] * sigmoid(gate), gate [T, G] -> [T, I]: G divides I, and each gate is for I / G entries side by
        side."""
        opened = gate.float().sigmoid().repeat_interleave(x.shape[1] // gate.shape[1], dim=1)
        return (x.float() * opened).to(x.dtype)

    def add_(self, x: Tensor, y: Tensor) -> Tensor:
        """x += y in place, [T, H] each; x, whose rows may not be views into wider ones."""
        return x.add_(y)

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        """x *= factor in place; x, which is contiguous."""
        return x.mul_(factor)

    def scale_rows_(self, x: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        """x[t] *= table[rows[t]] in place; x [T, I], whose rows may be views into wider ones, table [R] float32 and
        rows [T] int64, each below R."""
        return x.copy_(x.float() * table[rows].unsqueeze(1))

    def softcap_(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) in place; x, which is float32 and contiguous. An infinity becomes NaN: capped, it would
        pass for a number."""
        return x.copy_(torch.where(x.isfinite(), cap * torch.tanh(x / cap), torch.nan))

    def narrow(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x [T, H] float32, contiguous, in `dtype`, float32 or bfloat16; x itself if it has it."""
        return x.to(dtype)

    def zeros_like(self, x: Tensor) -> Tensor:
        """Zeros of the shape and dtype of x."""
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts of two or three dimensions, equal in all but the last, along the last."""
        return torch.cat(list(parts), dim=-1)

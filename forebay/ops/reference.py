"""The definition of every op in torch: what the native twin is tested against, and what runs where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.ops import sampling
from forebay.ops.linear import LinearWeight
from forebay.ops.reference_attention import TorchAttention
from forebay.ops.reference_linear import TorchLinear
from forebay.ops.reference_recurrence import TorchRecurrence


class TorchOps(TorchLinear, TorchAttention, TorchRecurrence):
    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * normed).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

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

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def mul_softplus(self, scale: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return scale * F.softplus(x.float() + bias)

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        table.index_copy_(0, rows.long(), values)

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.shape[0] == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        top = logits.amax(dim=-1)  # NaN if any entry is
        finite = top.isfinite()
        first = (logits == top.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)
        return torch.where(finite, first, torch.zeros_like(first)), finite

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        uniform: Tensor,
    ) -> Tensor:
        return sampling.sample_rows(logits, temperature, top_k, top_p, min_p, uniform)

    def fused_experts(
        self,
        x: Tensor,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        topk_ids: Tensor,
        topk_weights: Tensor,
        activate: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        activate = activate or self.silu_and_mul
        per_choice = x.new_zeros(*topk_ids.shape, x.shape[1])
        for e in sorted(set(topk_ids.flatten().tolist())):
            token, choice = torch.where(topk_ids == e)
            per_choice[token, choice] = self.linear(activate(self.linear(x[token], gate_up[e])), down[e])
        return (per_choice.float() * topk_weights.float().unsqueeze(-1)).sum(dim=1).to(x.dtype)

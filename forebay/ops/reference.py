"""The definition of every op in torch: what the native twin is tested against, and what runs where it cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.ops import sampling
from forebay.ops.interface import Draws
from forebay.ops.reference_attention import TorchAttention
from forebay.ops.reference_experts import TorchExpertOps
from forebay.ops.reference_recurrence import TorchRecurrence


class TorchOps(TorchExpertOps, TorchAttention, TorchRecurrence):
    """Inputs of quantized linear layers are rounded to `activation_bits`; with 0 they stay as they are."""

    def __init__(self, num_threads: int, activation_bits: int = 0) -> None:
        self.num_threads = num_threads
        self.activation_bits = activation_bits
        self.name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (weight.float() * normed).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def gather(self, table: Tensor, rows: Tensor) -> Tensor:
        return table.index_select(0, rows)

    def scatter(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        table.index_copy_(0, rows.long(), values)

    def finite_rows(self, x: Tensor) -> Tensor:
        return x.isfinite().all(dim=-1)

    def argmax_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.shape[0] == 0:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        top = logits.amax(dim=-1)  # NaN if any entry is
        finite = top.isfinite()
        first = (logits == top.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)
        return torch.where(finite, first, torch.zeros_like(first)), finite

    def sample_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        return sampling.sample_rows(logits, draws)
